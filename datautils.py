"""The dataset and the model that the ladder trains. You may skip this file: no lesson is in it."""

import torch
from torch import nn
from torch.utils.data import Dataset, default_collate

NUM_FEATURES, NUM_CLASSES = 20, 4


class MyTrainDataset(Dataset):
    """`size` random points in 4 classes, which a fixed random linear map, the teacher, assigns.

    A sample is (features, label): a float32 tensor of shape (20,) and an int64 from 0 to 3. The
    generator and its seed are the dataset's own, so every process, launcher and restart builds
    the same bytes, whatever else has drawn random numbers before.
    """

    def __init__(self, size: int):
        generator = torch.Generator().manual_seed(2048)
        self.features = torch.randn(size, NUM_FEATURES, generator=generator)
        teacher = torch.randn(NUM_FEATURES, NUM_CLASSES, generator=generator)
        self.labels = (self.features @ teacher).argmax(dim=1)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.features[index], self.labels[index]

    def __getitems__(self, indices):
        """A whole batch at once, (batch, 20) and (batch,): faster than sample by sample."""
        indices = torch.tensor(indices)
        return self.features.index_select(0, indices), self.labels.index_select(0, indices)


def collate(samples):
    """Make a batch of a list of samples, as usual. What is no list is a whole batch already."""
    return default_collate(samples) if isinstance(samples, list) else samples


def build_model() -> nn.Module:
    """A small MLP: (batch, 20) features in, (batch, 4) logits out."""
    return nn.Sequential(
        nn.Linear(NUM_FEATURES, 2048),
        nn.ReLU(),
        nn.Linear(2048, NUM_CLASSES),
    )
