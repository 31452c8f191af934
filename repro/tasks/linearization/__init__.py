"""Linearisation: training of a classifier that inherits from a pretrained softmax ViT."""
