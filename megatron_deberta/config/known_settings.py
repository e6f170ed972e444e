"""Names and old values of the settings that Python code gives to ``DebertaConfig``."""

from __future__ import annotations

import difflib
import warnings
from dataclasses import fields
from typing import Any

from megatron_deberta.config.renamed_keys import RENAMED_VALUES


class RenamedValues:
    """Base class of the dataclasses of sections with renamed values."""

    __slots__ = ()

    def __post_init__(self) -> None:
        """Replace old values, which Python code may give, by the new ones."""
        for key, (old, new) in RENAMED_VALUES.items():
            name = key.partition(".")[2]
            if getattr(self, name, None) == old:
                message = f"{key}={old!r} was renamed to {new!r}; use the new value"
                warnings.warn(message, DeprecationWarning, stacklevel=3)
                object.__setattr__(self, name, new)


class KnownSettings(RenamedValues):
    """Base class of the dataclass ``ModelConfig``, which users know as ``DebertaConfig``."""

    __slots__ = ()

    def __new__(cls, *values: Any, **settings: Any) -> KnownSettings:
        """Check the names of the settings, before the dataclass's own ``__init__`` would.

        Raises:
            TypeError: there is no setting of a name; names a similar one.
        """
        if values:
            raise TypeError("DebertaConfig takes settings by name, such as hidden_size=768")
        known = [setting.name for setting in fields(cls)]  # type: ignore[arg-type]
        for name in settings:
            if name not in known:
                close = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {close[0]}?" if close else f"it has {', '.join(known)}"
                raise TypeError(f"DebertaConfig has no setting {name}; {hint}")
        return object.__new__(cls)
