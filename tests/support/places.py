"""Where things lie in the checkout, and scripts as modules."""

import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "diloco"
SCRIPTS = ROOT / "scripts"
EXAMPLES = sorted((SCRIPTS / "examples").glob("*.py"))


def script_module(name: str) -> ModuleType:
    """The script of that name, which has no ending, loaded anew."""
    loader = SourceFileLoader(name, str(SCRIPTS / name))
    spec = spec_from_loader(name, loader)
    assert spec is not None
    sys.modules[name] = module = module_from_spec(spec)  # dataclasses look there
    loader.exec_module(module)
    return module
