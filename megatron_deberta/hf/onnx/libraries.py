"""The only module that imports ``onnx``, ``onnxruntime`` and ``onnxscript`` (extra ``[onnx]``)."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor, nn

from megatron_deberta import __version__
from megatron_deberta.errors import CheckpointError, ConfigError

OPSET = 20
"""Operator set of the graphs: the first with ``Gelu``; onnxruntime 1.17 or newer."""
IR_VERSION = 9
MAX_FILE_BYTES = (1 << 31) - (1 << 24)
"""Protocol buffers end at 2 GiB; larger models keep their constants in a second file."""
DATA_SUFFIX = "_data"
_MIN_EXTERNAL_BYTES = 1024
_ALIGNMENT = 4096

Array = npt.NDArray[Any]


def require_libraries() -> dict[str, str]:
    """Return the versions of onnx and onnxruntime.

    Raises:
        ConfigError: one of them is not installed.
    """
    try:
        import onnx
        import onnxruntime
    except ImportError as error:
        raise ConfigError(
            f"--to onnx needs {error.name}, which is not installed; run: "
            "pip install 'megatron-deberta[onnx]'"
        ) from error
    return {"onnx": onnx.__version__, "onnxruntime": onnxruntime.__version__}


class GraphWriter:
    """Builds an ONNX graph node by node.

    Floating-point constants are stored as ``dtype``. Methods return the name of their result.

    Args:
        path: file to write.
        dtype: float32 or float16.
        external: whether constants go to a second file, as they are added.
    """

    def __init__(self, path: Path, dtype: torch.dtype, *, external: bool) -> None:
        import onnx

        self._onnx = onnx
        self.path, self.dtype = path, dtype
        self.float_type = {
            torch.float32: onnx.TensorProto.FLOAT, torch.float16: onnx.TensorProto.FLOAT16
        }[dtype]  # fmt: skip
        self.types = onnx.TensorProto
        self._nodes: list[Any] = []
        self._numbers = count()
        self._constants: dict[str, Any] = {}
        self._inputs: list[Any] = []
        self._outputs: list[Any] = []
        self._added: dict[Any, list[str]] = {}
        self._data = open(path.with_name(path.name + DATA_SUFFIX), "wb") if external else None

    def op(self, kind: str, *inputs: str, **attributes: Any) -> str:
        """Add a node with one output; equal nodes are added once."""
        return self.ops(kind, 1, *inputs, **attributes)[0]

    def ops(self, kind: str, outputs: int, *inputs: str, **attributes: Any) -> list[str]:
        """Add a node with several outputs; equal nodes are added once."""
        key = (kind, inputs, repr(sorted(attributes.items())))
        if key not in self._added:
            stem = f"{kind}_{next(self._numbers)}"
            names = [stem] if outputs == 1 else [f"{stem}_{index}" for index in range(outputs)]
            self._nodes.append(
                self._onnx.helper.make_node(kind, list(inputs), names, name=stem, **attributes)
            )
            self._added[key] = names
        return self._added[key]

    def scan(self, body: Callable[..., str], index: str, *values: str) -> str:
        """Apply a function to each slice along the first axis, and stack the results.

        Args:
            body: adds the nodes of one slice; may use values from outside.
            index: int64 vector, one number for each slice.
            values: floating-point values of the same first size.
        """
        stem = f"Scan_{next(self._numbers)}"
        names = [f"{stem}_input_{number}" for number in range(1 + len(values))]
        info = self._onnx.helper.make_tensor_value_info
        inputs = [info(names[0], self.types.INT64, None)]
        inputs += [info(name, self.float_type, None) for name in names[1:]]
        graph = self._subgraph(stem, lambda: body(*names), inputs)
        return self.op("Scan", index, *values, body=graph, num_scan_inputs=len(names))

    def choose(self, condition: str, then: Callable[[], str], otherwise: Callable[[], str]) -> str:
        """Compute one of two floating-point values.

        Args:
            condition: boolean scalar.
            then: adds the nodes of the value if it is true.
            otherwise: adds those of the value if it is false.
        """
        stem = f"If_{next(self._numbers)}"
        branches = {
            name: self._subgraph(f"{stem}_{name}", body, [])
            for name, body in (("then_branch", then), ("else_branch", otherwise))
        }
        return self.op("If", condition, **branches)

    def _subgraph(self, name: str, body: Callable[[], str], inputs: list[Any]) -> Any:
        """Return the graph of the nodes that a function adds; its result is the output."""
        nodes, added = self._nodes, self._added
        self._nodes, self._added = [], dict(added)
        result = body()
        outputs = [self._onnx.helper.make_tensor_value_info(result, self.float_type, None)]
        graph = self._onnx.helper.make_graph(self._nodes, name, inputs, outputs)
        self._nodes, self._added = nodes, added
        return graph

    def constant(self, value: Tensor, name: str = "") -> str:
        """Add a constant; floating-point values are converted to ``dtype``.

        Args:
            value: the tensor, any shape.
            name: its name, unique in the graph; empty: numbered.
        """
        name = name or f"constant_{len(self._constants)}"
        if name not in self._constants:
            if value.is_floating_point():
                value = value.to(self.dtype)
            array = value.detach().contiguous().numpy()
            self._constants[name] = self._onnx.numpy_helper.from_array(array, name)
            if self._data is not None and array.nbytes >= _MIN_EXTERNAL_BYTES:
                self._move_out(self._constants[name], array)
        return name

    def integers(self, *values: int) -> str:
        """Add an int64 vector, such as a shape."""
        return self.constant(torch.tensor(values, dtype=torch.int64), f"int64_{values}")

    def number(self, value: float) -> str:
        """Add a scalar of ``dtype``."""
        return self.constant(torch.tensor(value), f"float_{value}")

    def index(self, value: int) -> str:
        """Add an int64 scalar."""
        return self.constant(torch.tensor(value), f"index_{value}")

    def input(self, name: str, *shape: str) -> str:
        """Declare an int64 input with dynamic sizes."""
        info = self._onnx.helper.make_tensor_value_info(name, self.types.INT64, list(shape))
        self._inputs.append(info)
        return name

    def output(self, name: str, value: str, *shape: str | int) -> None:
        """Declare a float32 output."""
        to = self.types.FLOAT
        node = self._onnx.helper.make_node("Cast", [value], [name], name=name, to=to)
        self._nodes.append(node)
        self._outputs.append(self._onnx.helper.make_tensor_value_info(name, to, list(shape)))

    def save(self, metadata: Mapping[str, str]) -> None:
        """Write the graph and check it.

        Args:
            metadata: properties stored in the model.

        Raises:
            CheckpointError: the graph is invalid.
        """
        helper = self._onnx.helper
        constants = list(self._constants.values())
        graph = helper.make_graph(self._nodes, "deberta", self._inputs, self._outputs, constants)
        model = helper.make_model(
            graph,
            opset_imports=[helper.make_opsetid("", OPSET)],
            ir_version=IR_VERSION,
            producer_name="megatron-deberta",
            producer_version=__version__,
        )
        helper.set_model_props(model, dict(metadata))
        if self._data is not None:
            self._data.close()
        self.path.write_bytes(model.SerializeToString())
        try:
            self._onnx.checker.check_model(str(self.path))
        except self._onnx.checker.ValidationError as error:
            raise CheckpointError(f"{self.path.name} is not a valid graph: {error}") from error

    def _move_out(self, constant: Any, array: Array) -> None:
        """Write a constant to the second file, and refer to it."""
        assert self._data is not None
        self._data.write(b"\0" * (-self._data.tell() % _ALIGNMENT))
        file, offset = self.path.name + DATA_SUFFIX, self._data.tell()
        self._data.write(array.tobytes())
        set_external_data = self._onnx.external_data_helper.set_external_data
        set_external_data(constant, file, offset, array.nbytes)
        constant.ClearField("raw_data")


def open_session(path: Path, threads: int = 0) -> Callable[[Mapping[str, Array]], list[Array]]:
    """Open a graph in onnxruntime on the CPU.

    Args:
        path: the file.
        threads: number of threads; 0: torch's.

    Returns:
        A function from input arrays by name to the outputs in order. Inputs that the graph lacks
        are ignored.

    Raises:
        CheckpointError: onnxruntime rejects the graph.
    """
    require_libraries()
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads or torch.get_num_threads()
    options.log_severity_level = 3
    try:
        session = onnxruntime.InferenceSession(
            str(path), options, providers=["CPUExecutionProvider"]
        )
    except Exception as error:  # onnxruntime has one exception type per status code
        raise CheckpointError(f"onnxruntime cannot load {path.name}: {error}") from error
    names = {entry.name for entry in session.get_inputs()}

    def run(inputs: Mapping[str, Array]) -> list[Array]:
        return list(session.run(None, {k: v for k, v in inputs.items() if k in names}))

    return run


def count_nodes(path: Path) -> int:
    """Return the number of nodes of a graph."""
    import onnx

    return len(onnx.load(str(path), load_external_data=False).graph.node)


def export_stock(model: nn.Module, inputs: Mapping[str, Tensor], path: Path) -> None:
    """Export a model of transformers with torch's own exporter, for comparison.

    Args:
        model: the model, in evaluation mode.
        inputs: example inputs ``[B, N]`` (or ``[B, C, N]``), all sizes above 1.
        path: file to write.

    Raises:
        ConfigError: onnxscript is not installed, or torch cannot export the model.
    """
    shapes = {
        name: dict.fromkeys(range(value.dim()), torch.export.Dim.DYNAMIC)
        for name, value in inputs.items()
    }
    with _quiet():
        try:
            program = torch.onnx.export(
                model, kwargs=dict(inputs), dynamic_shapes=shapes, dynamo=True, verbose=False
            )
            assert program is not None
            program.save(str(path))
        except ImportError as error:
            raise ConfigError(f"torch's exporter needs {error.name}") from error
        except Exception as error:  # whatever the exporter meets in a model
            raise ConfigError(f"torch cannot export the model: {error!r:.200}") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence warnings and logs of torch's exporter."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
