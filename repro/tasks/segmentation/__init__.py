"""Semantic segmentation: UperNet on the maps of an adapter, on ADE20K. The one package that imports mmsegmentation."""
