"""Uses of trained models: accuracy, predictions, samples, figures and probes of what they learned, and export."""
