"""What every script needs around its lesson. You may skip this package: no lesson is in it.

arguments   reads and checks the command line
agree       lets all ranks decide something together, such as to end
launch      knows which launcher started this process, and what it has to set
processes   lets the processes of a job end together
devices     knows which GPU belongs to this process
checks      finds before training, and before each save, what must not be saved
versions    compares the code of all machines, and their versions of Python and PyTorch
files       saves and reads snapshots, whole or not at all
locks       gives a file to one job at a time
output      prints lines, draws the progress bar, logs to Weights & Biases
streams     lets no print fail, and each line be one write
signals     waits for signals in a thread

docs/plumbing.md explains every function. Every rank has to call a function that begins with `all_`.
"""

import gc

from plumbing import launch, processes, streams
from plumbing.agree import all_exit_if as all_exit_if
from plumbing.agree import all_new_job_id as all_new_job_id
from plumbing.arguments import all_exit_if_args_bad as all_exit_if_args_bad
from plumbing.arguments import parse_args as parse_args
from plumbing.checks import all_exit_if_not_finite as all_exit_if_not_finite
from plumbing.checks import all_exit_if_unusable as all_exit_if_unusable
from plumbing.devices import count_gpus as count_gpus
from plumbing.files import all_broadcast_snapshot as all_broadcast_snapshot
from plumbing.files import all_exit_if_disks_differ as all_exit_if_disks_differ
from plumbing.files import all_read_snapshot as all_read_snapshot
from plumbing.files import print_resume as print_resume
from plumbing.files import save_atomically as save_atomically
from plumbing.output import log_to_wandb as log_to_wandb
from plumbing.output import print_rank as print_rank
from plumbing.output import progress_bar as progress_bar
from plumbing.output import report as report
from plumbing.output import start_wandb as start_wandb
from plumbing.processes import local_job as local_job
from plumbing.processes import require_torchrun as require_torchrun

streams.open_closed_streams()
launch.drop_empty_variables()
processes.take_signals_as_process_1()
gc.freeze()  # the objects of torch stay for good: the garbage collector need not visit them again
