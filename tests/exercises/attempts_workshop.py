"""What readers may try in the exercises of workshop.py, as edits of the solutions."""

ATTEMPTS = {
    "finetune": {
        "says": "Nobody has joined a process group",
        "cures": [
            (
                ("DistributedSampler(reviews)", "DistributedSampler(reviews, seed=7)"),
                (
                    "    ddp = DDP(model)  # from here",
                    "    model = ddp = DDP(model)  # from here",
                ),
                ("model.save_pretrained", "model.module.save_pretrained"),
                ("AdamW(model.parameters()", "AdamW(ddp.parameters()"),
                (
                    '        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))  # each '
                    "process has its own\n        torch.cuda.set_device(device)\n",
                    '        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))\n'
                    '        device = torch.device("cuda")\n',
                ),
            ),
            (  # without DDP
                ("    ddp = DDP(model)  # from", "    ddp = model  # from"),
                (
                    "            optimizer.step()\n",
                    "            for weight in model.parameters():\n"
                    "                dist.all_reduce(weight.grad)\n"
                    "                weight.grad /= dist.get_world_size()\n"
                    "            optimizer.step()\n",
                ),
            ),
        ],
        "wrong": [
            (
                (
                    (
                        "    loader = DataLoader(reviews, args.batch_size, sampler=sampler, ",
                        "    loader = DataLoader(reviews, args.batch_size, shuffle=True, ",
                    ),
                ),
                "The reviews are not divided: in 2 epochs of 16 the ranks read 64",
            ),
            ((("ddp(**batch", "model(**batch"),), "The ranks' models drift apart"),
            ((("        dist.all_reduce(totals)", "        # (totals)"),), "not of the job's"),
            (
                (("    if dist.get_rank() == 0:", "    if True:"),),
                "finetuned/ was written by rank0 and rank1",
            ),
            ((('"LOCAL_RANK"', '"RANK"'),), "the model goes to cuda:3"),
            (
                (
                    (
                        '        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))',
                        '        device = torch.device("cuda")',
                    ),
                ),
                "the model goes to cuda:0",
            ),
            ((("init_process_group()", 'init_process_group("gloo")'),), "NCCL is for GPUs"),
            ((("        sampler.set_epoch(epoch)", "        #"),), "in the same order"),
        ],
    },
    "bindings": {
        "says": "local rank 0 is on cores 0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15, and those next",
        "cures": [
            (
                (
                    "    mine = sorted(near[local_rank] & allowed)[neighbours.index(local_rank) :: "
                    "len(neighbours)]\n",
                    "    mine = sorted(near[local_rank] & allowed)\n"
                    "    size, place = len(mine) // len(neighbours), neighbours.index(local_rank)\n"
                    "    mine = mine[place * size : (place + 1) * size]\n",
                ),
            ),
        ],
        "wrong": [
            (
                (("[neighbours.index(local_rank) :: len(neighbours)]", ""),),
                "local ranks 0 and 1 share cores",
            ),
            (
                (("near[local_rank] & allowed", "near[local_rank]"),),
                "and the job was given 2,3,4,5",
            ),
            (
                (
                    (
                        "sorted(near[local_rank] & allowed)[neighbours.index(local_rank) :: "
                        "len(neighbours)]",
                        "sorted(allowed)[local_rank :: len(near)]",
                    ),
                ),
                "and those next to GPU 0 are",
            ),
            (
                (("setaffinity(0, mine)", "setaffinity(0, mine[:1])"),),
                "stand idle",
            ),
            ((('"LOCAL_RANK"])  # and', '"RANK"])  # and'),), "IndexError"),
        ],
    },
    "batch_file": {
        "says": "It asks for no GPU",
        "cures": [
            (
                ("#SBATCH --gpus-per-node=2 ", "#SBATCH --gres=gpu:2 "),
                ("#SBATCH --ntasks-per-node=1 ", "#SBATCH -n 1 "),
                ("#SBATCH --cpus-per-task=16 ", "#SBATCH -c 16 "),
                ("set -e #", "source .venv/bin/activate\nset -e #"),
                (
                    "    local gpus=$1 begin=$SECONDS\n    shift\n",
                    "    local gpus=$1\n    shift\n    time \\\n",
                ),
                ("torchrun --standalone", "python -m torch.distributed.run --standalone"),
                ('    echo "GPUs: $gpus | seconds: $((SECONDS - begin))"\n', ""),
            ),
            (  # the batch file's own cores: no srun
                (
                    '    srun --cpus-per-task="$SLURM_CPUS_PER_TASK" \\\n        torchrun',
                    "    torchrun",
                ),
                ('run_on "$SLURM_GPUS_ON_NODE" "$@"', 'run_on gpu "$@"'),
            ),
            (
                ("#SBATCH --cpus-per-task=16 ", "#SBATCH --cpus-per-gpu=8 "),
                ('srun --cpus-per-task="$SLURM_CPUS_PER_TASK"', 'srun --gpus="$gpus"'),
            ),
        ],
        "wrong": [
            ((("#SBATCH --gpus-per-node=2 ", "##SBATCH --gpus-per-node=2 "),), "asks for no GPU"),
            ((("--ntasks-per-node=1 ", "--ntasks-per-node=2 "),), "at the same time"),
            ((('srun --cpus-per-task="$SLURM_CPUS_PER_TASK"', "srun"),), "has 1 core"),
            ((('run_on 1 "$@"', 'run_on 1 "$@" &'),), "at the same time"),
            ((("$((SECONDS - begin))", "$SECONDS"),), "no such number is printed"),
            ((('run_on "$SLURM_GPUS_ON_NODE" "$@"', 'run_on 1 "$@"'),), "seen: 1 and then 1"),
            ((('run_on 1 "$@"', "run_on 1 finetune.py"),), "and starts finetune.py"),
            ((("    echo ", "    if echo "),), "bash cannot read it"),
        ],
    },
    "srun": {
        "says": "KeyError: 'RANK'",
        "cures": [
            (  # by a URL, and the node list read by hand
                (
                    'os.environ["MASTER_ADDR"] = first_host()\n',
                    "import re\n"
                    'address = re.sub(r"\\[(\\w+).*", r"\\1", os.environ["SLURM_STEP_NODELIST"])\n',
                ),
                ('os.environ["MASTER_PORT"] = str(10000 +', "port = str(20000 +"),
                (
                    "init_process_group(rank",
                    'init_process_group("gloo", f"tcp://{address}:{port}", rank',
                ),
            ),
            (  # the variables that torchrun would set
                (
                    "dist.init_process_group(rank=rank, world_size=world_size)",
                    'os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size)}\n'
                    "dist.init_process_group()",
                ),
            ),
        ],
        "wrong": [
            (
                (("= first_host()", '= os.environ["SLURM_JOB_NODELIST"].split(",")[0]'),),
                "would look for it at gpu[07-08]",
            ),
            ((("= first_host()", '= "localhost"'),), "would look for it at localhost"),
            (
                (("= first_host()", '= os.environ["SLURMD_NODENAME"]'),),
                "rank 3, on gpu08, would look for it at gpu08",
            ),
            (
                (('str(10000 + int(os.environ["SLURM_JOB_ID"]) % 20000)', '"29500"'),),
                "would both meet at port 29500",
            ),
            (
                (
                    (
                        'str(10000 + int(os.environ["SLURM_JOB_ID"]) % 20000)',
                        'os.environ["SLURM_JOB_ID"]',
                    ),
                ),
                "ports are 1024 to 65535",
            ),
            (
                (("SLURM_PROCID", "SLURM_LOCALID"),),
                "take themselves for ranks 0 of 4, 1 of 4, 0 of 4",
            ),
            ((('int(os.environ["SLURM_LOCALID"])', "rank"),), "rank 2 GPU 2"),
        ],
    },
}
