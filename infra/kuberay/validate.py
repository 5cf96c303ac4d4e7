#!/usr/bin/env python3
"""Checks manifests against the schemas of custom resource definitions, as a server of Kubernetes would.

    python infra/kuberay/validate.py --crds DIR [FILE...]

DIR: YAML files of definitions, such as `helm-chart/kuberay-operator/crds` of the repository of KubeRay. Without FILE: every file
beside this one. Kinds without a definition in DIR are named and left out. A field that a schema does not know is an error.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator

Schemas = dict[tuple[str, str], dict[str, Any]]


def schemas_of(folder: Path) -> Schemas:
    """By apiVersion and kind."""
    found: Schemas = {}
    for path in sorted(folder.rglob("*.y*ml")):
        for document in yaml.safe_load_all(path.read_text(encoding="utf-8")):
            if (document or {}).get("kind") != "CustomResourceDefinition":
                continue
            spec = document["spec"]
            for version in spec["versions"]:
                name = f"{spec['group']}/{version['name']}", spec["names"]["kind"]
                found[name] = strict(version["schema"]["openAPIV3Schema"])
    return found


def strict(schema: Any) -> Any:
    """A structural schema in JSON Schema's words: unknown fields are errors, and `x-kubernetes-*` mean what they do there."""
    if isinstance(schema, list):
        return [strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    others = {
        name: value for name, value in schema.items() if name != "properties" and not name.startswith("x-kubernetes-")
    }
    changed = {name: strict(value) for name, value in others.items()}
    if schema.get("x-kubernetes-int-or-string"):
        changed.pop("type", None)
        changed["anyOf"] = [{"type": "integer"}, {"type": "string"}]
    if isinstance(properties := schema.get("properties"), dict):
        changed["properties"] = {name: strict(value) for name, value in properties.items()}
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            changed.setdefault("additionalProperties", False)
    if schema.get("nullable") and isinstance(schema.get("type"), str):
        changed["type"] = [schema["type"], "null"]
    return changed


def faults_of(path: Path, schemas: Schemas) -> Iterator[str]:
    """One line for each fault; for a kind without a schema a line that begins with "not checked"."""
    for document in filter(None, yaml.safe_load_all(path.read_text(encoding="utf-8"))):
        kind = document.get("apiVersion", ""), document.get("kind", "")
        schema = schemas.get(kind)
        if schema is None:
            yield f"not checked: {path.name}: no definition of {' '.join(kind)}"
            continue
        schema = {**schema, "properties": {**schema.get("properties", {}), "metadata": {"type": "object"}}}
        for error in Draft202012Validator(schema).iter_errors(document):
            place = "/".join(map(str, error.absolute_path))
            yield f"{path.name}: {place or 'the document'}: {error.message[:300]}"


def main(arguments: Iterable[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--crds", type=Path, required=True, help="folder of custom resource definitions")
    parser.add_argument("files", type=Path, nargs="*", help="manifests; default: those beside this file")
    given = parser.parse_args(None if arguments is None else list(arguments))
    if not (schemas := schemas_of(given.crds)):
        parser.error(f"{given.crds} holds no CustomResourceDefinition")
    files = given.files or sorted(Path(__file__).parent.glob("*.yaml"))
    lines = [line for path in files for line in faults_of(path, schemas)]
    faults = [line for line in lines if not line.startswith("not checked")]
    print("\n".join([*lines, f"{len(files)} files, {len(faults)} faults"]))
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
