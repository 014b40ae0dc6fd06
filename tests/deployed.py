"""The files in deploy/: YAML documents, the Dockerfile's instructions, and the commands of the containers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).resolve().parents[1] / "deploy"
KUBERNETES = sorted((DEPLOY / "kubernetes").glob("*.yaml"))


def documents(path: Path) -> list[dict[str, Any]]:
    """The YAML documents of a file."""
    return list(yaml.safe_load_all(path.read_text(encoding="utf-8")))


def one(kind: str) -> dict[str, Any]:
    """The only Kubernetes object of that kind."""
    (found,) = (document for path in KUBERNETES for document in documents(path) if document["kind"] == kind)
    return dict(found)


def pod_templates() -> dict[str, dict[str, Any]]:
    """The templates of pods, by who makes the pods: ``deployment``, ``leader``, ``worker``."""
    group = one("LeaderWorkerSet")["spec"]["leaderWorkerTemplate"]
    return {
        "deployment": one("Deployment")["spec"]["template"],
        "leader": group["leaderTemplate"],
        "worker": group["workerTemplate"],
    }


def container(maker: str) -> dict[str, Any]:
    """The only container of a pod."""
    (found,) = pod_templates()[maker]["spec"]["containers"]
    return dict(found)


def dockerfile() -> list[tuple[str, str]]:
    """Instructions and their arguments, with continued lines joined, without comments."""
    text = (DEPLOY / "docker" / "Dockerfile").read_text(encoding="utf-8")
    text = re.sub(r"^[ \t]*#.*\n", "", text, flags=re.MULTILINE)
    text = re.sub(r"\\\n\s*", "", text)
    return [(line.split()[0], line.split(maxsplit=1)[1].strip()) for line in text.splitlines() if line.strip()]


def instruction(name: str) -> str:
    """The arguments of an instruction that comes once."""
    (found,) = (arguments for word, arguments in dockerfile() if word == name)
    return found


def entrypoint() -> list[str]:
    """The command of the image, to which the arguments of a container are added."""
    return list(map(str, json.loads(instruction("ENTRYPOINT"))))


def health_check() -> list[str]:
    """The command that Docker runs in the container."""
    return list(map(str, json.loads(instruction("HEALTHCHECK").split("CMD ", 1)[1])))


def filled(command: list[str], environment: dict[str, str]) -> list[str]:
    """``$(NAME)`` replaced as Kubernetes does."""
    return [re.sub(r"\$\((\w+)\)", lambda name: environment[name[1]], word) for word in command]
