"""Prints the weights after a few steps of torch.optim.Muon, one number a line: rows columns steps nesterov scale."""
import sys
import torch

rows, columns, steps, nesterov, scale = sys.argv[1:]
rows, columns, steps = int(rows), int(columns), int(steps)
index = torch.arange(rows * columns, dtype=torch.float64)
weight = torch.nn.Parameter(torch.sin(index).float().view(rows, columns))
optimizer = torch.optim.Muon([weight], lr=0.02, weight_decay=0.1, momentum=0.95, nesterov=nesterov == "1",
                             adjust_lr_fn=scale)
for step in range(1, steps + 1):
    noise = torch.sin(index * 1.7 + step) * 43758.5453
    weight.grad = (noise - torch.floor(noise) - 0.5).float().view(rows, columns)
    optimizer.step()
print("\n".join(repr(v) for v in weight.detach().double().flatten().tolist()))
