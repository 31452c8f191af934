"""One module per verb: its parameters, its command-line options, and `run(params, paths, ...)`."""
