// SPDX-License-Identifier: Apache-2.0
//
// Attention of one sequence by several processes on CPUs, with sockets between them:
//
//     ./processes [ranks [keys|heads [rows]]]          4 ranks, keys, 1000 rows
//
// Each process has some rows, computes forward and backward by fovea/parallel.h, and compares its results with those of
// one process. The collectives of this file are 60 lines; a program of yours has NCCL, MPI or the like in their place.
#include <poll.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <numeric>
#include <stdexcept>

#include "attention.h"

namespace {

namespace parallel = fovea::parallel;

// Sends to one process while it receives from another, since both may have more to say than a socket keeps.
void exchange(int to, const char* send, int from, char* receive, std::size_t bytes) {
  for (std::size_t sent = 0, received = 0; sent < bytes || received < bytes;) {
    pollfd ready[2] = {{sent < bytes ? to : -1, POLLOUT, 0}, {received < bytes ? from : -1, POLLIN, 0}};
    if (poll(ready, 2, 60000) <= 0) {
      throw std::runtime_error("a rank does not answer");
    }
    if (ready[0].revents != 0) {
      const ssize_t count = ::send(to, send + sent, bytes - sent, MSG_DONTWAIT | MSG_NOSIGNAL);
      if (count < 0 && errno != EAGAIN && errno != EINTR) {
        throw std::runtime_error("a rank is gone");
      }
      sent += count > 0 ? static_cast<std::size_t>(count) : 0;
    }
    if (ready[1].revents != 0) {
      const ssize_t count = recv(from, receive + received, bytes - received, MSG_DONTWAIT);
      if (count == 0 || (count < 0 && errno != EAGAIN && errno != EINTR)) {
        throw std::runtime_error("a rank is gone");
      }
      received += count > 0 ? static_cast<std::size_t>(count) : 0;
    }
  }
}

// sockets[r] leads to rank r.
parallel::Collectives collectives(int rank, const std::vector<int>& sockets) {
  const int ranks = static_cast<int>(sockets.size());
  parallel::Collectives group;
  group.rank = rank;
  group.ranks = ranks;
  // Step s: to the rank s further on, from the one s before.
  const auto rounds = [=](const void* send, void* receive, std::size_t bytes, bool same_for_all) {
    const auto part = [&](int other) { return same_for_all ? 0 : bytes * static_cast<std::size_t>(other); };
    const char* const mine = static_cast<const char*>(send);
    char* const theirs = static_cast<char*>(receive);
    std::memcpy(theirs + bytes * static_cast<std::size_t>(rank), mine + part(rank), bytes);
    for (int step = 1; step < ranks; ++step) {
      const int to = (rank + step) % ranks, from = (rank - step + ranks) % ranks;
      exchange(sockets[to], mine + part(to), sockets[from], theirs + bytes * static_cast<std::size_t>(from), bytes);
    }
  };
  group.all_gather = [=](const void* send, void* receive, std::size_t bytes, void*) {
    rounds(send, receive, bytes, true);
  };
  group.all_to_all = [=](const void* send, void* receive, std::size_t bytes, void*) {
    rounds(send, receive, bytes, false);
  };
  group.reduce_scatter = [=](const float* send, float* receive, std::size_t count, void*) {
    std::vector<float> parts(count * static_cast<std::size_t>(ranks));
    rounds(send, parts.data(), count * sizeof(float), false);
    for (std::size_t n = 0; n < count; ++n) {
      receive[n] = 0;
      for (std::size_t other = 0; other < static_cast<std::size_t>(ranks); ++other) {
        receive[n] += parts[other * count + n];
      }
    }
  };
  return group;
}

bool compute(const example::Sizes& sizes, const parallel::Rows& rows, const parallel::Collectives& group,
             parallel::Move move) {
  const fovea::Options options = example::options();
  const std::vector<std::int64_t> index = example::index_of(rows, group.rank);
  example::Tensors mine = example::make(sizes, index);
  fovea::Workspace workspace;
  parallel::run(example::forward(sizes, mine.rows, example::addresses(mine), options), rows, group, workspace, move);
  parallel::run(example::backward(sizes, mine.rows, example::addresses(mine), options), rows, group, workspace, move);

  std::vector<std::int64_t> all(static_cast<std::size_t>(sizes.rows));
  std::iota(all.begin(), all.end(), std::int64_t{0});
  example::Tensors alone = example::make(sizes, all);
  run(example::forward(sizes, sizes.rows, example::addresses(alone), options), workspace);
  run(example::backward(sizes, sizes.rows, example::addresses(alone), options), workspace);
  // A piece of a few rows is computed as decoding is, with other bits.
  constexpr std::int64_t kFew = 8;
  const std::vector<parallel::Piece>& pieces = rows.pieces(group.rank);
  const bool has_few = std::any_of(pieces.begin(), pieces.end(), [&](const parallel::Piece& piece) {
    return piece.rows * sizes.heads <= kFew * sizes.key_heads;
  });
  return example::right(sizes, mine, alone, index, /*error=*/move == parallel::Move::kKeys && has_few ? 2e-6 : 0,
                        group.rank);
}

}  // namespace

int main(int argc, char** argv) {
  const int ranks = argc > 1 ? std::atoi(argv[1]) : 4;
  const std::string how = argc > 2 ? argv[2] : "keys";
  example::Sizes sizes;
  sizes.rows = argc > 3 ? std::atoll(argv[3]) : sizes.rows;
  if (ranks < 1 || ranks > 64 || (how != "keys" && how != "heads") || sizes.rows < 1) {
    std::fprintf(stderr, "usage: %s [ranks [keys|heads [rows]]]; ranks are 1 to 64, rows at least 1\n", argv[0]);
    return 2;
  }
  sizes.key_heads = how == "heads" ? ranks : sizes.key_heads;  // a multiple of the ranks
  sizes.heads = 4 * sizes.key_heads;
  // A pair of sockets for each pair of ranks.
  std::vector<std::vector<int>> sockets(static_cast<std::size_t>(ranks), std::vector<int>(ranks, -1));
  for (int a = 0; a < ranks; ++a) {
    for (int b = a + 1; b < ranks; ++b) {
      int pair[2];
      if (socketpair(AF_UNIX, SOCK_STREAM, 0, pair) != 0) {
        std::perror("socketpair");
        return 1;
      }
      sockets[a][b] = pair[0];
      sockets[b][a] = pair[1];
    }
  }
  std::vector<pid_t> children;
  for (int rank = 0; rank < ranks; ++rank) {
    const pid_t child = fork();
    if (child == 0) {
      for (int other = 0; other < ranks; ++other) {  // so that a rank that is gone is noticed
        for (const int socket : other == rank ? std::vector<int>{} : sockets[other]) {
          close(socket);
        }
      }
      int status = 1;
      try {
        const parallel::Rows rows = parallel::Rows::zigzag(sizes.rows, ranks);
        const auto move = how == "heads" ? parallel::Move::kHeads : parallel::Move::kKeys;
        status = compute(sizes, rows, collectives(rank, sockets[rank]), move) ? 0 : 1;
      } catch (const std::exception& error) {
        std::fprintf(stderr, "rank %d of %d: %s\n", rank, ranks, error.what());
      }
      std::fflush(nullptr);
      _exit(status);
    }
    children.push_back(child);
  }
  for (const std::vector<int>& of_rank : sockets) {
    for (const int socket : of_rank) {
      close(socket);
    }
  }
  int failed = 0;
  for (const pid_t child : children) {
    int status = 0;
    waitpid(child, &status, 0);
    failed += status != 0;
  }
  std::printf("%d ranks, %s: %s\n", ranks, how.c_str(), failed == 0 ? "as one process" : "FAILED");
  return failed == 0 ? 0 : 1;
}
