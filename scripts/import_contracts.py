"""Two contracts that import-linter lacks.

Its own list what is forbidden. That cannot hold "the standard library alone", since the next package to be installed is
not on the list; and its `protected` type refuses a package that nobody imports yet.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import grimp
from importlinter import Contract, ContractCheck, fields, output


def _within(module: str, packages: Iterable[str]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


class _PairsContract(Contract):
    """What both report: pairs of (importer, imported) that should not be."""

    def render_broken_contract(self, check: ContractCheck) -> None:
        for importer, imported in check.metadata["strays"]:
            output.print_error(f"{importer} must not import {imported}")


class OnlyContract(_PairsContract):
    """What `source_modules` and all beneath them import lies within `allowed_modules`."""

    type_name = "only"

    source_modules: Any = fields.ListField(subfield=fields.StringField())
    allowed_modules: Any = fields.ListField(subfield=fields.StringField())

    def check(self, graph: grimp.ImportGraph, verbose: bool) -> ContractCheck:  # noqa: ARG002 - the base class's
        strays = [
            (importer, imported)
            for importer in sorted(graph.modules)
            if _within(importer, self.source_modules)
            for imported in sorted(graph.find_modules_directly_imported_by(importer))
            if not _within(imported, self.allowed_modules)
        ]
        return ContractCheck(kept=not strays, metadata={"strays": strays})


class ReservedContract(_PairsContract):
    """`reserved_modules` and what is beneath them, less `open_modules`, are imported by `allowed_importers` and by each
    other alone.
    """

    type_name = "reserved"

    reserved_modules: Any = fields.ListField(subfield=fields.StringField())
    open_modules: Any = fields.ListField(subfield=fields.StringField(), required=False, default=[])
    allowed_importers: Any = fields.ListField(subfield=fields.StringField())

    def check(self, graph: grimp.ImportGraph, verbose: bool) -> ContractCheck:  # noqa: ARG002 - the base class's
        strays = [
            (importer, imported)
            for imported in sorted(graph.modules)
            if _within(imported, self.reserved_modules) and not _within(imported, self.open_modules)
            for importer in sorted(graph.find_modules_that_directly_import(imported))
            if not _within(importer, [*self.allowed_importers, *self.reserved_modules])
        ]
        return ContractCheck(kept=not strays, metadata={"strays": strays})
