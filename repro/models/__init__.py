"""Model families in timm's conventions. Importing this package registers all of them with timm.

The package imports every module in this folder, so a new family needs no entry here. A list would be code on which the
trained results of all families depend.
"""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
