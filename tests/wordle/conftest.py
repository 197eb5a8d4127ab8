from __future__ import annotations

import sys
from pathlib import Path

# The example is run from its own folder and is no part of the package.
_EXAMPLES = str(Path(__file__).parents[2] / "examples")
if _EXAMPLES not in sys.path:
    sys.path.insert(0, _EXAMPLES)
