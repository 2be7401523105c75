"""The Dockerfile, without Docker: what it installs and sets is tried in a fresh environment."""

import re

from launch import ROOT


def instructions(name):
    """What stands behind each `name` in the Dockerfile, in order, with continued lines joined."""
    text = re.sub(r"^\s*#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
    return re.findall(rf"^{name}\s+(.*)$", text.replace("\\\n", ""), re.MULTILINE)


def test_the_image_is_a_fixed_one_without_root():
    (image,) = instructions("FROM")
    assert re.fullmatch(r"[\w/.-]+:[\w.-]+", image) and not image.endswith(":latest")
    assert instructions("USER")[-1].split(":")[0] not in ("root", "0")
    mounts = re.findall(r"docker run .*-v \S+?:(\S+)", (ROOT / "Dockerfile").read_text())
    assert mounts and set(mounts) == set(instructions("WORKDIR"))
