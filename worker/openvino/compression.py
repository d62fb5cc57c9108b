"""Compression: rounded weights in a converted graph. Knows the graph alone, no model and no file.

A weight becomes constants of 8 bits and the operations that restore it, in the pattern that openvino documents for
compressed weights: the CPU plugin joins them with the product that follows and never holds the restored weight.
"""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from vectormill.models.rounding import SMALLEST_TABLE_ROWS, RoundedWeight, round_linear, round_table
from worker.openvino.runtime import openvino as ov

# Dense modules behind the pooling work on one vector a sequence: nothing to gain, and no sum averages their error.
COMPRESSED_PART: Final = "__module.network.transformer"
WEIGHT_PLACES: Final = {"MatMul": 1, "Gather": 0}  # which input of the operation holds a weight


def apply_compression(model: Any) -> int:
    """Compress the linear layers and large tables of an openvino model. Return the number of weights."""
    num_weights = 0
    for node in model.get_ordered_ops():
        kind = node.get_type_name()
        if kind not in WEIGHT_PLACES or not node.get_friendly_name().startswith(COMPRESSED_PART):
            continue
        place = WEIGHT_PLACES[kind]
        constant = node.input_value(place).get_node()
        if not _is_weight(constant):
            continue
        weight: NDArray[np.float32] = constant.data
        if kind == "MatMul" and node.get_attributes()["transpose_b"]:  # as torch's linear layers are written
            rounded = round_linear(weight)
        elif kind == "Gather" and len(weight) >= SMALLEST_TABLE_ROWS:
            rounded = round_table(weight)
        else:
            continue
        node.input(place).replace_source_output(_restore(rounded, weight.shape).output(0))
        num_weights += 1
    model.validate_nodes_and_infer_types()
    return num_weights


def _is_weight(node: Any) -> bool:
    is_table = node.get_type_name() == "Constant" and len(node.shape) == 2
    return is_table and bool(node.get_element_type() == ov.Type.f32)


def _restore(rounded: RoundedWeight, shape: tuple[int, ...]) -> Any:
    """Return the operations that restore a weight of that shape."""
    whole = ov.opset13.convert(ov.opset13.constant(rounded.numbers), "f32")
    restored = ov.opset13.multiply(whole, ov.opset13.constant(rounded.scales))
    return ov.opset13.reshape(restored, np.array(shape, np.int64), special_zero=False)
