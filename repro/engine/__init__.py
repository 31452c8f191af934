"""The training loop and its parts. It knows the Task protocol and nothing of models, data sets or losses."""
