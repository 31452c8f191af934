"""Model families in timm's conventions. Importing this package registers all of them with timm.

Families are found, not listed: a new module in this folder is enough, and changes no code on which the trained results
of another family depend.
"""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
