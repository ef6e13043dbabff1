"""One call's arguments, bound once and rebuilt once."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ._errors import InputError

Key = int | str


@dataclass(frozen=True, slots=True)
class Call:
    """Positional arguments under their position, keywords under their name."""

    values: dict[Key, Any]
    parameters: tuple[inspect.Parameter, ...]

    @staticmethod
    def of(
        parameters: Sequence[inspect.Parameter], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> "Call":
        """Return the call of a function with ``parameters``."""
        values: dict[Key, Any] = dict(enumerate(args))
        for name, value in kwargs.items():
            values[name] = value
        return Call(values, tuple(parameters))

    def key(self, position: int, name: str | None) -> Key:
        """Return where an argument was given: at its position, or under its name."""
        if position in self.values:
            return position
        name = self._name(position) if name is None else name
        if name not in self.values:
            called = f" or as {name}=" if name is not None else ""
            raise InputError(f"no argument at position {position}{called} in this call")
        return name

    def option(self, name: str) -> Any:
        """Return what was given as ``name``, else its default, else None."""
        if name in self.values:
            return self.values[name]
        for position, parameter in enumerate(self.parameters):
            if parameter.name == name:
                default = None if parameter.default is parameter.empty else parameter.default
                return self.values.get(position, default)
        return None

    def says(self, name: str) -> bool:
        """Return whether ``name`` was given, or has a default."""
        return self.gives(name) or any(
            parameter.name == name and parameter.default is not parameter.empty
            for parameter in self.parameters
        )

    def gives(self, name: str) -> bool:
        """Return whether ``name`` was given, by position or by name."""
        return name in self.values or any(
            parameter.name == name and position in self.values
            for position, parameter in enumerate(self.parameters)
        )

    def names_beside(self, keys: Sequence[Key], known: Sequence[str]) -> list[str]:
        """Return the other arguments that were given something that is not their default."""
        defaults = {p.name: p.default for p in self.parameters}
        others = []
        for key, value in self.values.items():
            name = self._name(key) if isinstance(key, int) else key
            default = defaults.get(name) if name is not None else None
            if key not in keys and name not in known and not _same(value, default):
                others.append(str(key) if name is None else name)
        return others

    def rebuild(self, changes: Mapping[Key, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Return positional and keyword arguments with some values replaced."""
        values = {**self.values, **changes}
        args = [value for key, value in values.items() if isinstance(key, int)]
        return args, {key: value for key, value in values.items() if isinstance(key, str)}

    def _name(self, position: int) -> str | None:
        named = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        if position < len(self.parameters) and self.parameters[position].kind in named:
            return self.parameters[position].name
        return None


def _same(value: Any, default: Any) -> bool:
    """Return whether a value is its default, or a plain scalar or tuple of them equal to it."""
    if value is default:
        return True
    if type(value) is not type(default):
        return False
    if isinstance(value, tuple):
        return len(value) == len(default) and all(map(_same, value, default))
    return isinstance(value, (bool, int, float, str)) and value == default
