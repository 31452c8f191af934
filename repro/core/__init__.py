"""The base of every stage, independent of models: parameters, paths, records, seeds, devices, errors."""
