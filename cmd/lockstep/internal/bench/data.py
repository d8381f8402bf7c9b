"""PyTorch's DataLoader on the images of `lockstep bench data`: one pass over them for each line of the input."""

import glob
import sys
import time

import numpy
import torch
from PIL import Image


class Folder(torch.utils.data.Dataset):
    def __init__(self, folder):
        self.names = sorted(glob.glob(folder + "/*.png"))

    def __len__(self):
        return len(self.names)

    def __getitem__(self, i):
        pixels = numpy.asarray(Image.open(self.names[i]), dtype=numpy.float32)
        return torch.from_numpy(pixels / 255), i % 10


def main():
    folder, batch, workers = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    loader = torch.utils.data.DataLoader(
        Folder(folder), batch_size=batch, shuffle=True, num_workers=workers, persistent_workers=True)
    next(iter(loader))  # starts the workers
    print("ready", flush=True)
    for _ in sys.stdin:
        start, rows = time.perf_counter(), 0
        for images, _ in loader:
            rows += len(images)
        print(rows, time.perf_counter() - start, flush=True)


main()
