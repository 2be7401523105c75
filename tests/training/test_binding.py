"""--bind-cpus: which cores a process gets, on machines that are made of files here."""

from types import SimpleNamespace

import launch
import pytest
import torch

from training.binding import mask_of, near, share

DIES = [6, 7, 2, 3, 0, 1, 4, 5]  # of GPU 0 to 7, on the node of docs/clusters.md


@pytest.fixture
def node(tmp_path, monkeypatch):
    """Eight dies with eight cores, of two hardware threads each, and a GPU near each die."""
    for cpu in range(128):
        folder = tmp_path / f"devices/system/cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "physical_package_id").write_text(f"{cpu % 64 // 32}\n")
        (folder / "core_id").write_text(f"{cpu % 64}\n")
    for gpu, die in enumerate(DIES):
        folder = tmp_path / f"bus/pci/devices/0001:{gpu:02x}:1f.0"
        folder.mkdir(parents=True)
        mask = 0xFF << 8 * die | 0xFF << 8 * die + 64
        words = [f"{mask >> shift & 0xFFFFFFFF:08x}" for shift in (96, 64, 32, 0)]
        (folder / "local_cpus").write_text(",".join(words) + "\n")

    def properties(device):
        return SimpleNamespace(pci_domain_id=1, pci_bus_id=device.index, pci_device_id=0x1F)

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    return tmp_path


def test_each_gpu_has_the_cores_of_its_die(node):
    """The masks are those of the page, which has the first thread of each core."""
    masks = []
    for gpu in range(8):
        cpus = near(torch.device("cuda", gpu), node)
        assert cpus == {
            8 * DIES[gpu] + core + 64 * thread for core in range(8) for thread in (0, 1)
        }
        masks.append(mask_of(cpu for cpu in cpus if cpu < 64))
    page = (launch.ROOT / "docs" / "clusters.md").read_text()
    assert f"--cpu-bind=mask_cpu:{','.join(masks)}" in page


def test_processes_with_the_same_cores_share_them(node):
    """Whole cores: both hardware threads of one go to the same process."""
    cpus = near(torch.device("cuda", 4), node)
    assert share(cpus, 0, 2, node) == [0, 64, 1, 65, 2, 66, 3, 67]
    assert share(cpus, 1, 2, node) == [4, 68, 5, 69, 6, 70, 7, 71]
    assert share(cpus, 16, 17, node) == [], "more processes than cores"


@pytest.mark.parametrize("device", ["cuda:0", "cpu"])
def test_a_machine_that_does_not_tell(tmp_path, monkeypatch, device):
    """No GPU, or none that the PCI bus knows: then all cores are as near."""
    properties = SimpleNamespace(pci_domain_id=0, pci_bus_id=0, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert near(torch.device(device), tmp_path) == set()
