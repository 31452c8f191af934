"""Training: the loop and its parts, which know the class Task and nothing of models, data sets or losses."""
