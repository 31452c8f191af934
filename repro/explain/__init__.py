"""Looking inside trained models: inner gradients and losses, receptive fields, and what a changed inner learner does."""
