"""Engine of a model whose parts are updated one after the other, by optimizers of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from torch import Tensor, nn

from megatron_deberta.engine.base import (
    Engine,
    FetchState,
    HeldState,
    ParameterState,
    ReadNorm,
    StepOutcome,
)


class EngineSequence(Engine):
    """One engine for each of some submodules, which hold all parameters.

    Each has its own moments, gradient norm and loss scale. Their states appear as one, with the
    submodule's name before parameters and scalars.

    Args:
        module: the whole model.
        names: its submodules.
        build: returns the engine of a submodule; its arguments are the submodule's name and the
            submodule.
    """

    def __init__(
        self,
        module: nn.Module,
        names: Sequence[str],
        build: Callable[[str, nn.Module], Engine],
    ) -> None:
        self.module = module
        self._parts: dict[str, Engine] = {}
        for name in names:
            self._parts[name] = build(name, module.get_submodule(name))

    @property
    def parts(self) -> tuple[Engine, ...]:
        """The engines, in the order of their updates."""
        return tuple(self._parts.values())

    def backward(self, loss: Tensor) -> None:
        """Raise RuntimeError; call ``backward`` of one of ``parts``."""
        raise RuntimeError("call backward of one of the parts")

    def step(self, learning_rate: float, norm_limit: float | ReadNorm = 0.0) -> StepOutcome:
        """Raise RuntimeError; call ``step`` of one of ``parts``."""
        raise RuntimeError("call step of one of the parts")

    def set_accumulation_steps(self, accumulation_steps: int) -> None:
        """Set the number of micro batches of the following steps, for each part."""
        for engine in self.parts:
            engine.set_accumulation_steps(accumulation_steps)

    def gather_states(self) -> Iterator[tuple[str, ParameterState]]:
        """Yield the states of each part, in order."""
        for part, engine in self._parts.items():
            for name, state in engine.gather_states():
                yield f"{part}.{name}", state

    def held_states(self) -> Iterator[HeldState]:
        """Yield this rank's partitions of each part, in order."""
        for part, engine in self._parts.items():
            for name, start, tensors in engine.held_states():
                yield f"{part}.{name}", start, tensors

    def load_states(self, fetch: FetchState) -> None:
        """Set every parameter and its moments."""

        def fetch_of(part: str) -> FetchState:
            return lambda name: fetch(f"{part}.{name}")

        for part, engine in self._parts.items():
            engine.load_states(fetch_of(part))

    def state_dict(self) -> dict[str, int | float]:
        """Return the scalars of all parts."""
        return {
            f"{part}.{key}": value
            for part, engine in self._parts.items()
            for key, value in engine.state_dict().items()
        }

    def load_state_dict(self, scalars: Mapping[str, int | float]) -> None:
        """Restore the values of ``state_dict``; call it after ``load_states``."""
        for part, engine in self._parts.items():
            start = f"{part}."
            engine.load_state_dict(
                {k.removeprefix(start): v for k, v in scalars.items() if k.startswith(start)}
            )

    def destroy(self, *, is_last: bool = True) -> None:
        """Release each part's resources, in reverse."""
        for engine in reversed(self.parts):
            engine.destroy(is_last=is_last and engine is self.parts[0])
