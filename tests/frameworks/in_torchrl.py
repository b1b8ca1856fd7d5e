"""TorchRL: advantages normalized over the rollouts of all ranks, PPO's loss a mean over all their frames."""

import torch
from tensordict import TensorDict
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
from torch import nn
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE
from trainings import Training, undivided
from variants import Way, loop

import diffcoll as dc

FRAMES = 5


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.policy, self.value = nn.Linear(3, 4).double(), nn.Linear(3, 1).double()


def rollouts(rows, generator):
    def normal(*shape):
        return torch.randn(rows, FRAMES, *shape, generator=generator, dtype=torch.double)

    done = torch.zeros(rows, FRAMES, 1, dtype=torch.bool)
    done[:, -1] = True
    return normal(3), normal(3), normal(2).clamp(-1, 1), normal(1), done, normal(1).squeeze(-1)


def ppo(agent, observation, after, action, reward, done, log_prob, *, normalize=None):
    """PPO's loss of these rollouts; without `normalize` TorchRL normalizes their advantages."""
    split = nn.Module()  # loc and a positive scale, of the two halves
    split.forward = lambda out: (out[..., :2], out[..., 2:].exp())
    actor = ProbabilisticTensorDictSequential(
        TensorDictModule(agent.policy, ["observation"], ["out"]),
        TensorDictModule(split, ["out"], ["loc", "scale"]),
        ProbabilisticTensorDictModule(
            ["loc", "scale"],
            ["action"],
            distribution_class=lambda loc, scale: torch.distributions.Independent(
                torch.distributions.Normal(loc, scale), 1
            ),
            return_log_prob=True,
        ),
    )
    critic = TensorDictModule(agent.value, ["observation"], ["state_value"])
    later = {"observation": after, "reward": reward, "done": done, "terminated": done}
    data = TensorDict(
        {"observation": observation, "action": action, "action_log_prob": log_prob, "next": later}, done.shape[:2]
    )
    GAE(gamma=0.9, lmbda=0.8, value_network=critic, average_gae=normalize is None)(data)
    if normalize:
        data["advantage"] = normalize(data["advantage"])
    found = ClipPPOLoss(actor, critic, functional=False, normalize_advantage=False)(data)
    return found["loss_objective"] + found["loss_critic"] + found["loss_entropy"]


def over_ranks(advantage):
    """As TorchRL on one process: the deviation is unbiased, and at least 1e-4."""
    count, mean, variance = dc.nn.functional.moments(advantage, (0, 1, 2))
    return (advantage - mean) / (variance * count / (count - 1)).sqrt().clamp_min(1e-4)


def share_of_ppo(agent, rollout, update):
    frames = torch.tensor(len(rollout[0]) * FRAMES, dtype=torch.double)
    share = frames / dc.all_reduce(frames) / len(update)
    return dc.get_world_size() * ppo(agent, *rollout, normalize=over_ranks) * share


def mean_of_ppo(agent, micro_batches):
    return sum(ppo(agent, *rollout) for rollout in micro_batches) / len(micro_batches)


def with_averager(loss):
    return lambda agent, updates: loop(agent, updates, loss, averager=dc.GradientAverager(agent))


PPO = Training(Agent, rollouts, mean_of_ppo, sizes=((3, 2, 4), (2, 5, 1)))
RIGHT = {"PPO": Way(with_averager(share_of_ppo), PPO)}
FACTORS = [("TorchRL", Way(with_averager(undivided(share_of_ppo)), PPO))]
