"""ViT³ (arXiv:2512.01643): a study of inner learners for vision, and the models that follow from it."""
