"""JUnit's XML, which the pages of CI systems show: one suite with a test case for each finding."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from xml.etree import ElementTree

_COUNTS = {"failure": "failures", "error": "errors", "skipped": "skipped"}


@dataclass(frozen=True, slots=True, kw_only=True)
class JUnitCase:
    """A test case.  ``kind`` is ``failure``, ``error`` or ``skipped``; None for one that passed, whose ``message``
    becomes its output.  ``text`` are the further lines of the others."""

    name: str
    kind: str | None
    message: str
    text: str = ""
    seconds: float = 0.0


def as_junit(program: str, properties: Mapping[str, str], cases: Iterable[JUnitCase]) -> str:
    """Return the document of ``program``, such as ``tp-engine check``."""
    listed, counts = list(cases), Counter[str]()
    suite = ElementTree.Element("testsuite", name=program, hostname=platform.node() or "localhost")
    of_suite = ElementTree.SubElement(suite, "properties")
    for key, value in properties.items():
        ElementTree.SubElement(of_suite, "property", name=key, value=_xml_text(value))
    for one in listed:
        case = ElementTree.SubElement(
            suite,
            "testcase",
            classname=program.replace("-", "_").replace(" ", "."),
            name=_xml_text(one.name),
            time=f"{one.seconds:.3f}",
        )
        if one.kind is None:
            ElementTree.SubElement(case, "system-out").text = _xml_text(one.message)
        else:
            counts[one.kind] += 1
            ElementTree.SubElement(case, one.kind, message=_xml_text(one.message)).text = _xml_text(one.text)
    suite.set("tests", str(len(listed)))
    for kind, name in _COUNTS.items():
        suite.set(name, str(counts[kind]))
    suite.set("time", f"{sum(one.seconds for one in listed):.3f}")
    root = ElementTree.Element("testsuites")
    root.append(suite)
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _xml_text(text: str) -> str:
    """Without the characters that XML does not have."""
    return "".join(one if one in "\t\n" or (ord(one) >= 32 and one not in "\ufffe\uffff") else "?" for one in text)
