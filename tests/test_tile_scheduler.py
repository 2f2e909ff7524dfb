"""Which keys a cluster of decode attention attends to: the device's code on the CPU, for all clusters of a launch."""

import subprocess

from stub_cuda import compile_stub


def test_every_key_once_and_every_cluster_knows_who_shares_a_work_tile(tmp_path):
    """Sequences of any lengths, with padding and windows; as many work tiles as clusters, fewer and more."""
    done = subprocess.run([compile_stub("tile_scheduler", tmp_path)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout
