"""Looking inside trained models: inner gradients and losses, receptive fields, and what changes when the inner learner is changed."""
