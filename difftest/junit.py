"""Results as JUnit XML, for CI systems to show."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

from kv_canary.difftest.campaign import CampaignResult


def write_junit(path: Path, result: CampaignResult, *, replay: dict[str, str]) -> None:
    """Write one test case per target, failed where something was found in it, with the line that replays it."""
    failures = {f.op: f for f in result.findings.values()}
    suite = ET.Element(
        "testsuite",
        name="kv-canary difftest",
        tests=str(len(result.stats)),
        failures=str(len(failures)),
        errors=str(len(result.errors)),
        time=f"{result.seconds:.1f}",
    )
    for target, stats in result.stats.items():
        case = ET.SubElement(
            suite, "testcase", classname="kv_canary.difftest", name=target, time=f"{stats.seconds:.1f}"
        )
        for finding in (f for f in result.findings.values() if f.op == target):
            ET.SubElement(case, "failure", message=finding.says).text = replay[str(finding.file)]
    # What an engine's step found is told of an op that was no target by itself.
    for finding in (f for f in result.findings.values() if f.op not in result.stats):
        case = ET.SubElement(suite, "testcase", classname="kv_canary.difftest", name=finding.op)
        ET.SubElement(case, "failure", message=finding.says).text = replay[str(finding.file)]
    for text in result.errors:
        ET.SubElement(suite, "system-err").text = text
    ET.ElementTree(suite).write(path, encoding="unicode", xml_declaration=True)
