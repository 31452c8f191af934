"""Looking inside trained models: inner gradients and losses, receptive fields, and the effect of a changed inner
learner.
"""
