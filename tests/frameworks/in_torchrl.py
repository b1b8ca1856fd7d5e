"""TorchRL: advantages normalized over the rollouts of all ranks, PPO's loss a mean over all their frames."""

import torch
from tensordict import TensorDict
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import nn
from torchrl.modules import IndependentNormal, ProbabilisticActor
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE
from trainings import Training, Way, loop, of_page

import diffcoll as dc

FRAMES = 5
normalize = of_page("README.md", "normalize")


def agent():
    torch.manual_seed(0)
    policy, value = nn.Sequential(nn.Linear(3, 4), NormalParamExtractor()), nn.Linear(3, 1)
    return nn.ModuleDict({"policy": policy, "value": value}).double()


def rollouts(rows, generator):
    def normal(*shape):
        return torch.randn(rows, FRAMES, *shape, generator=generator, dtype=torch.double)

    done = torch.zeros(rows, FRAMES, 1, dtype=torch.bool)
    done[:, -1] = True
    return normal(3), normal(3), normal(2).clamp(-1, 1), normal(1), done, normal(1).squeeze(-1)


def ppo(agent, rollout, update):
    """This rank's share of PPO's loss of all rollouts; on one process TorchRL normalizes their advantages."""
    observation, after, action, reward, done, log_prob = rollout
    on_ranks = dc.get_world_size() > 1
    policy = TensorDictModule(agent["policy"], ["observation"], ["loc", "scale"])
    actor = ProbabilisticActor(policy, ["loc", "scale"], distribution_class=IndependentNormal, return_log_prob=True)
    critic = TensorDictModule(agent["value"], ["observation"], ["state_value"])
    later = {"observation": after, "reward": reward, "done": done, "terminated": done}
    data = TensorDict(
        {"observation": observation, "action": action, "action_log_prob": log_prob, "next": later}, done.shape[:2]
    )
    GAE(gamma=0.9, lmbda=0.8, value_network=critic, average_gae=not on_ranks)(data)
    if on_ranks:
        data["advantage"] = normalize(data["advantage"])
    found = ClipPPOLoss(actor, critic, functional=False, normalize_advantage=False)(data)
    frames = torch.tensor(done.numel(), dtype=torch.double)
    share = dc.get_world_size() * frames / dc.all_reduce(frames)
    return (found["loss_objective"] + found["loss_critic"] + found["loss_entropy"]) * share


def averaged(model, updates, loss):
    loop(model, updates, loss, averager=dc.GradientAverager(model))


ROWS = [("TorchRL", Way(averaged, Training(agent, rollouts, ppo, sizes=((3, 2, 4), (2, 5, 1)))))]
