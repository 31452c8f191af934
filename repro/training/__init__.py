"""Training: the loop and its parts, which know the class Task and nothing of models, data sets or losses; and jobs,
which build a
cell of params.yaml from its task, train it with each of its seeds, and record it."""
