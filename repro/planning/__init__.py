"""What the parameters would run, for which tables and figures of the paper, and what it costs. Nothing is started."""
