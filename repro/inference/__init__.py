"""Using trained models: accuracy on a data set, pictures of what they learned, and files for other programs; inner
gradients and losses, receptive fields, attention, and the effect of a changed inner learner.
"""
