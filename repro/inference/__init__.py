"""Using trained models: accuracy on a data set, pictures of what they learned, and files for other programs."""
