"What is asked of an attention. Public names come from the pages that make them when they are first used."
import importlib

_PAGES = {"conformance_tests": "kit", "reproduce": "kit", "find": "conformance", "SUITE_VERSION": "conformance"}

def __dir__(): return [*globals(), *_PAGES]

def __getattr__(name):
    if name not in _PAGES: raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    page = importlib.import_module(f"{__name__}.{_PAGES[name]}")
    return page.suite_version() if name == "SUITE_VERSION" else getattr(page, name)
