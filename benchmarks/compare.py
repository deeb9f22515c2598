#!/usr/bin/env python3
"""Dovetail beside PyTorch's own data parallelism, interleaved in one run; prints ratios as a table and writes JSON.

usage: benchmarks/compare.py [--sizes S M] [--ranks 2 4] [--rounds 2] [--steps 8] [--warm 3] [--systems ...] [--out FILE.json]

Every round runs each system once, one after the other, on the same machine with one thread a rank, Gloo on loopback and
MALLOC_MMAP_THRESHOLD_=262144 on all sides. A figure is the median over rounds of the median over steps. Memory is the growth
of the peak resident set in steady state over the level before the model was built, per rank; where ranks share pages
(systems that end in _peer) the largest of their proportional sets (Pss: a page counts once, divided among those that map it).
The rivals' script and model are those of ../shared/rivals (option --rivals).
"""
import argparse, json, os, platform, statistics, subprocess, sys, tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(HERE)
ATTEMPTS = 3
# Each of ours and the rivals that do the same with it.
RIVALS = {"dovetail": "fsdp2", "dovetail_peer": "fsdp2", "dovetail_bf16_peer": "fsdp2_bf16",
          "dovetail_muon_peer": "fsdp2_muonwa", "dovetail_bf16": "fsdp2_bf16", "dovetail_muon": "fsdp2_muonwa",
          "dovetail_adam8": "fsdp2_ao8", "dovetail_py": "fsdp2", "dovetail_py_peer": "fsdp2",
          "dovetail_py_bf16_peer": "fsdp2_bf16", "dovetail_py_bf16": "fsdp2_bf16",
          "dovetail_py_muon_peer": "fsdp2_muonwa", "dovetail_py_muon": "fsdp2_muonwa", "dovetail_py_linear": "fsdp2",
          "dovetail_py_linear_peer": "fsdp2", "dovetail_py_linear_bf16_peer": "fsdp2_bf16"}


def cpu():
    for line in open("/proc/cpuinfo"):
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def run(system, size, ranks, args, out):
    env = dict(os.environ, OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo", MALLOC_MMAP_THRESHOLD_="262144")
    launcher = [os.path.join(ROOT, ".venv/bin/torchrun"), "--nproc-per-node", str(ranks)]
    if system.startswith("dovetail_py"):  # the rivals' own Python model
        command = launcher + [os.path.join(HERE, "python_bench.py"), "--system", system, "--rivals", args.rivals]
    elif system.startswith("dovetail"):
        words = system.split("_")[1:]
        command = launcher + ["--no-python", os.path.join(args.build, "bin/step_bench"), "--format",
                              "bf16" if "bf16" in words else "fp32"]
        command += ["--optimizer", next((w for w in words if w not in ("bf16", "peer")), "adamw")]
        command += ["--comm", "peer" if "peer" in words else "c10d"]
    else:
        command = launcher + [os.path.join(args.rivals, "bench.py"), "--system", system]
    command += ["--size", size, "--bs", "1", "--steps", str(args.steps), "--warm", str(args.warm), "--out", out]
    for attempt in range(ATTEMPTS):  # torch's own teardown aborts now and then; such a run is repeated as a whole
        if os.path.exists(out):
            os.remove(out)
        done = subprocess.run(command, env=env, text=True, capture_output=True)
        if done.returncode == 0:
            break
        print(f"  {system}: exit code {done.returncode}, attempt {attempt + 1} of {ATTEMPTS}", flush=True)
    else:
        sys.exit(f"{' '.join(command)}\n{done.stdout}\n{done.stderr}\nfailed with exit code {done.returncode}")
    result = json.loads(open(out).read().splitlines()[-1])
    print("  " + [l for l in done.stdout.splitlines() if l.strip()][-1], flush=True)
    return result


def level_before(r):
    """Of resident memory before the model: of the moment, not the peak of loading libraries."""
    return r["rss_base"] if r["asked"].endswith("_peer") else r.get("rss_before_model", r["rss_base"])


def summarise(results):
    step = statistics.median(r["step"] for r in results)
    growth = statistics.median(r["rss_peak_steady"] - level_before(r) for r in results)
    sent = statistics.median(r["tx_MiB_rank"] for r in results)
    update = statistics.median(r["opt"] for r in results)
    return dict(step_ms=1e3 * step, update_ms=1e3 * update, growth_MiB=growth, sent_MiB=sent,
                plan_MiB=results[0].get("plan_MiB_rank"))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["S", "M"])
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--warm", type=int, default=3, help="first steps that are left out")
    parser.add_argument("--systems", nargs="+",
                        default=["local", "dovetail_peer", "dovetail", "fsdp2", "ddp", "local_bf16", "dovetail_bf16_peer",
                                 "dovetail_bf16", "fsdp2_bf16"])
    parser.add_argument("--rivals", default=os.path.join(ROOT, "../shared/rivals"))
    parser.add_argument("--build", default=os.path.join(ROOT, "build"))
    parser.add_argument("--out", default=os.path.join(HERE, "results/compare.json"))
    args = parser.parse_args()
    if not os.path.exists(os.path.join(args.rivals, "bench.py")):
        sys.exit(f"compare: wanted the rivals' bench.py in {args.rivals}, found none; name its folder with --rivals")

    raw = []
    with tempfile.TemporaryDirectory() as folder:
        for size in args.sizes:
            for ranks in args.ranks:
                for round_ in range(args.rounds):
                    print(f"size {size}, {ranks} ranks, round {round_ + 1} of {args.rounds}", flush=True)
                    for system in args.systems:
                        r = run(system, size, ranks, args, os.path.join(folder, "out.jsonl"))
                        raw.append(dict(r, asked=system, size=size, ranks=ranks, round=round_))

    lines = ["| size, ranks | system | step ms | x local | x rival | update ms | x rival | growth MiB | x rival | "
             "sent MiB a rank | planned |",
             "|---|---|---|---|---|---|---|---|---|---|---|"]
    table = []
    for size in args.sizes:
        for ranks in args.ranks:
            cells = {s: summarise([r for r in raw if (r["asked"], r["size"], r["ranks"]) == (s, size, ranks)])
                     for s in args.systems}
            for s, c in cells.items():
                base = cells.get(RIVALS.get(s, s if s.startswith("fsdp2") else "fsdp2"))
                local = cells.get("local_bf16" if "bf16" in s and "local_bf16" in cells else "local")
                row = dict(size=size, ranks=ranks, system=s, **c,
                           x_local=local and c["step_ms"] / local["step_ms"],
                           x_rival=base and c["step_ms"] / base["step_ms"],
                           x_update=base and c["update_ms"] / base["update_ms"],
                           x_growth=base and c["growth_MiB"] / base["growth_MiB"])
                table.append(row)
                show = lambda v, f: "" if v is None else f.format(v)
                lines.append(f"| {size} {ranks} | {s} | {c['step_ms']:.0f} | {show(row['x_local'], '{:.2f}')} | "
                             f"{show(row['x_rival'], '{:.2f}')} | {c['update_ms']:.0f} | "
                             f"{show(row['x_update'], '{:.2f}')} | {c['growth_MiB']:.0f} | {show(row['x_growth'], '{:.2f}')} | "
                             f"{c['sent_MiB']:.1f} | {show(c['plan_MiB'], '{:.1f}')} |")
    print("\n" + "\n".join(lines))
    document = dict(command="benchmarks/compare.py " + " ".join(sys.argv[1:]), cpu=cpu(), cores=os.cpu_count(),
                    table=table, raw=raw)
    with open(args.out, "w") as f:
        json.dump(document, f, indent=1)
    with open(os.path.splitext(args.out)[0] + ".md", "w") as f:
        f.write(f"`{document['command']}` on {document['cpu']}, {document['cores']} cores\n\n" + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
