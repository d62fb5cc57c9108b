"""Import openvino without its model converter, which a model process does not use."""

import sys
from typing import Final

CONVERTER: Final = "openvino.tools.ovc"

if "openvino" not in sys.modules:
    # openvino imports its converter if it is installed, and with it telemetry, an HTTP client and parsers: 14
    # MiB and half of the import's time. Here the converter is hidden; code that converts imports it by its
    # own name.
    sys.modules[CONVERTER] = None  # type: ignore[assignment]  # an import of it raises ImportError
    try:
        import openvino
    finally:
        del sys.modules[CONVERTER]
else:
    import openvino

__all__ = ["openvino"]
