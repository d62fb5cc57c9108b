"""Import openvino without its converter of models, which a model process does not use."""

import sys
from typing import Final

CONVERTER: Final = "openvino.tools.ovc"

if "openvino" not in sys.modules:
    # openvino imports its converter when it is there, and with it telemetry, a client of HTTP and parsers: 14 MiB and
    # half of the time that the import takes. Here it is not there; who converts imports it by its name.
    sys.modules[CONVERTER] = None  # type: ignore[assignment]  # an import of it raises ImportError
    try:
        import openvino
    finally:
        del sys.modules[CONVERTER]
else:
    import openvino

__all__ = ["openvino"]
