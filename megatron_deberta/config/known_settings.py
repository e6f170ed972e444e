"""Names of the settings that Python code gives to ``DebertaConfig``."""

from __future__ import annotations

import difflib
from dataclasses import fields
from typing import Any


class KnownSettings:
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
