"""What every stage needs and what knows nothing of models: parameters, paths, records, seeds, devices, errors."""
