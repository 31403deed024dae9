"""What is installed and run is named exactly: the lock of deployments, the build backend, and the
actions of CI."""

from __future__ import annotations

import re

from tests.support.places import ROOT

LOCK = (ROOT / "scripts" / "requirements.lock").read_text()
PYPROJECT = (ROOT / "pyproject.toml").read_text()
PINNED = re.compile(r"([a-z0-9-]+)==(\S+) --hash=sha256:[0-9a-f]{64}")


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def locked() -> dict[str, str]:
    lines = [line for line in LOCK.splitlines() if not line.startswith("#")]
    found = [PINNED.fullmatch(line) for line in lines]
    assert all(found), [line for line, match in zip(lines, found, strict=True) if match is None]
    return {match[1]: match[2] for match in found if match}


def test_every_file_of_a_deployment_has_a_hash_and_the_version_that_is_tested() -> None:
    text = (ROOT / "scripts" / "constraints.txt").read_text()
    tested = {
        normal(name): version
        for name, version in re.findall(r"^([A-Za-z][\w.-]*)==([^;\s]+)", text, re.M)
    }
    assert {name: tested.get(name, version) for name, version in locked().items()} == locked()
    assert f"torch=={tested['torch']}" in LOCK and "torch" not in locked()
    assert not re.search(r"^[^#]*(://|--index|--extra)", LOCK, re.M)


def test_what_diloco_imports_is_in_the_lock() -> None:
    named = re.search(r"^dependencies = \[(.*?)\]", PYPROJECT, re.M | re.S)
    assert named is not None
    wanted = {normal(one) for one in re.findall(r'"([A-Za-z][\w.-]*)', named[1])}
    assert wanted - {"torch"} <= locked().keys() and len(wanted) > 1


def test_the_build_backend_and_the_actions_of_ci_are_pinned() -> None:
    assert re.search(r'^requires = \["hatchling==[\d.]+"\]$', PYPROJECT, re.M)
    for workflow in (ROOT / ".github" / "workflows").glob("*.yml"):
        text = workflow.read_text()
        used = re.findall(r"uses: (\S+)", text)
        assert used and all(re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", action) for action in used)
        assert "EXTRA_INDEX" not in text
