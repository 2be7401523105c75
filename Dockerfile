# An environment for the scripts, which are not in it themselves: they come with the folder that you mount.
#
#   docker build -t pytorch-dev .
#   docker run -it --gpus all --ipc=host -v $(pwd):/workspace pytorch-dev
#
# --ipc=host: processes that train together share memory, and Docker's own limit for it is small.
# Several nodes: add --network=host. You are not user 1000 of your machine: add --user "$(id -u):$(id -g)".

# torch's wheels bring the CUDA libraries, and the host brings the driver.
# dumb-init becomes process 1, because the system drops signals that process 1 has no handler for: `docker stop`
# would kill a script that does not know SIGTERM only after ten seconds.
FROM python:3.12-slim

WORKDIR /workspace
COPY requirements.txt .
# hadolint ignore=DL3013
RUN pip install --no-cache-dir -r requirements.txt dumb-init

# The user may be any number (--user), which has neither a home nor a name, and programs ask for both.
# LNAME: of the variables in which Python looks for a name, one that a real name (LOGNAME, USER) overrides.
# PYTHONUNBUFFERED: what a program prints is in `docker logs` immediately.
ENV HOME=/tmp \
    LNAME=dev \
    PYTHONUNBUFFERED=1

# Not root, or all that you save belongs to root. Most Linux machines give this number to their first user.
USER 1000:1000
ENTRYPOINT ["dumb-init", "--single-child", "--"]
CMD ["bash"]
