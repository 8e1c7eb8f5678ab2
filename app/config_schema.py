"""The configuration as JSON Schema, with what each key means, for editors that complete and check TOML.

Ranges and what must go together are checked where a Struct is made; the schema says what a key is called, which type it
has, its default, and whether a reload applies it.
"""

import ast
import inspect
import textwrap
from collections.abc import Iterator
from typing import Any

import msgspec

from app.config_changes import is_live
from app.config_tree import struct_in
from app.settings import TENANT_ID, Settings

DIALECT = "https://json-schema.org/draft/2020-12/schema"
LIVE = "x-firsttoken-live"
"""Of a key: whether a reload applies it; otherwise it needs a restart."""


def config_schema() -> dict[str, Any]:
    """The JSON Schema of the configuration file."""
    schema = msgspec.json.schema(Settings)
    definitions: dict[str, Any] = schema["$defs"]
    for path, kind in _structs(Settings, ""):
        described = field_texts(kind)
        for name, entry in definitions[kind.__name__]["properties"].items():
            key = f"{path}.{name}" if path else name
            if text := described.get(name):
                entry["description"] = text
            if "$ref" not in entry:
                entry[LIVE] = is_live(key)
    properties = definitions["Settings"]["properties"]
    properties["tenants"]["propertyNames"] = {"pattern": f"^{TENANT_ID.pattern}$"}
    # What a policy changes is written as under [reducer].
    reducer = definitions["PolicySettings"]["properties"]["reducer"]
    del reducer["type"]
    reducer["$ref"] = "#/$defs/ReducerConfig"
    return {"$schema": DIALECT, "title": "firsttoken.toml", **schema}


def field_texts(kind: type[msgspec.Struct]) -> dict[str, str]:
    """The texts that stand below the fields of a Struct in its source."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    assert isinstance(tree, ast.ClassDef), "the source of a class is one"
    found = {}
    for field, after in zip(tree.body, tree.body[1:], strict=False):
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
            continue
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            found[field.target.id] = " ".join(str(after.value.value).replace("``", "`").split())
    return found


def _structs(kind: type[msgspec.Struct], path: str) -> Iterator[tuple[str, type[msgspec.Struct]]]:
    """All Structs with the path of one place where each stands."""
    yield path, kind
    for field in msgspec.structs.fields(kind):
        inner = struct_in(field.type)
        if inner is not None:
            yield from _structs(inner, f"{path}.{field.name}" if path else field.name)
