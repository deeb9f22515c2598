#!/usr/bin/env python3
"""Loss curves of several runs in one picture.

usage: benchmarks/curves.py RUN_FOLDER... --out FILE.svg

Reads metrics.jsonl of each run; draws the training loss, smoothed over 20 steps, and the validation losses as dots, and
prints the validation losses by step.
"""
import argparse, json, os

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 760, 400, 60, 40, 30
COLORS = ["#1864ab", "#e8590c", "#2f9e44", "#9c36b5"]


def read(folder):
    steps, validations = [], []
    with open(os.path.join(folder, "metrics.jsonl")) as lines:
        for line in map(json.loads, lines):
            if "val_loss" in line:
                validations.append((line["step"], line["val_loss"]))
            elif "loss" in line:
                steps.append((line["step"], line["loss"]))
    window, smooth = 20, []
    for i, (step, _) in enumerate(steps):
        part = [loss for _, loss in steps[max(0, i - window + 1):i + 1]]
        smooth.append((step, sum(part) / len(part)))
    return smooth, validations


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+")
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    curves = {os.path.basename(os.path.normpath(r)): read(r) for r in args.runs}
    last = max(step for smooth, _ in curves.values() for step, _ in smooth)
    shown = [loss for smooth, _ in curves.values() for step, loss in smooth if step > 20]
    low, high = min(shown) - 0.05, max(shown) + 0.05
    x = lambda step: LEFT + (WIDTH - LEFT - 20) * step / last
    y = lambda loss: TOP + (HEIGHT - TOP - BOTTOM) * (high - min(loss, high)) / (high - low)
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
           'font-size="12"><rect width="100%" height="100%" fill="white"/>']
    for i in range(6):
        loss, step = low + (high - low) * i / 5, last * i // 5
        out.append(f'<line x1="{LEFT}" x2="{WIDTH - 20}" y1="{y(loss):.1f}" y2="{y(loss):.1f}" stroke="#dee2e6"/>'
                   f'<text x="{LEFT - 8}" y="{y(loss) + 4:.1f}" text-anchor="end">{loss:.2f}</text>'
                   f'<text x="{x(step):.1f}" y="{HEIGHT - 20}" text-anchor="middle">{step}</text>')
    for (name, (smooth, validations)), color in zip(curves.items(), COLORS):
        points = " ".join(f"{x(s):.1f},{y(l):.1f}" for s, l in smooth if s >= 10)
        out.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="1.8"/>')
        out += [f'<circle cx="{x(s):.1f}" cy="{y(l):.1f}" r="4" fill="{color}"/>' for s, l in validations]
        row = TOP + 16 * list(curves).index(name)
        out.append(f'<text x="{WIDTH - 30}" y="{row}" text-anchor="end" fill="{color}">{name}: training (line), '
                   f'validation (dots, last {validations[-1][1]:.3f})</text>' if validations else "")
        print(name, " ".join(f"{s}:{l:.4f}" for s, l in validations))
    out.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - 4}" text-anchor="middle">step (nats per token)</text></svg>')
    with open(args.out, "w") as f:
        f.write("\n".join(out) + "\n")


if __name__ == "__main__":
    main()
