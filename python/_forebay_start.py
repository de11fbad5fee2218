"""What forebay_hook.pth imports when `forebay run` has set FOREBAY_HOOK.

Loads forebay/_internal/hook.py alone: the package around it would be imported by every Python
program.
"""

try:
    import importlib.util
    import os
    import sys

    _file = os.path.join(
        os.path.dirname(os.path.abspath(__file__)), "forebay", "_internal", "hook.py"
    )
    _spec = importlib.util.spec_from_file_location("_forebay_hook", _file)
    if _spec is not None and _spec.loader is not None:
        _hook = importlib.util.module_from_spec(_spec)
        sys.modules["_forebay_hook"] = _hook
        _spec.loader.exec_module(_hook)
        _hook.install()
except Exception:  # noqa: BLE001, S110 - the program does not need it
    pass
