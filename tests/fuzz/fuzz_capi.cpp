// SPDX-License-Identifier: Apache-2.0
//
// A fuzzer of the C ABI. Each round draws a problem (subject.h), half of them spoilt in one to three places, and
// calls the library with it. What must hold:
//
//     a right problem is computed                  a refused one has a status, a message, and wrote nothing
//     no byte outside the tensors is touched       (guard pages) nor one between the elements of an output
//     a sample of what was computed agrees with the reference
//
// With --cuda the problems go to the GPU that the process sees, which is meant to be the played one of tests/cpp/fake:
// problems are planned, kernels prepared and launched, and every plan must have kernels.
//
// Every round has its own generator: `--seed S --from R --rounds 1` repeats round R of run S, and a crash says both.
// Ends with 0 if all held, with 1 otherwise.
#include <fmt/format.h>
#include <signal.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <numeric>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fovea/c.h"
#include "subject.h"

namespace fovea::fuzz {
namespace {

volatile std::uint64_t running_seed;
volatile std::uint64_t running_round;

// Says which round it was, then lets the signal do what it does. Formats by hand: little else is safe here.
extern "C" void say_round(int signal) {
  const auto write_number = [](std::uint64_t number) {
    char digits[20];
    int at = sizeof(digits);
    do {
      digits[--at] = static_cast<char>('0' + number % 10);
      number /= 10;
    } while (number != 0);
    return write(STDERR_FILENO, digits + at, sizeof(digits) - static_cast<std::size_t>(at));
  };
  const auto write_text = [](const char* text) { return write(STDERR_FILENO, text, std::strlen(text)); };
  if (write_text("crashed: --seed ") < 0 || write_number(running_seed) < 0 || write_text(" --from ") < 0 ||
      write_number(running_round) < 0 || write_text(" --rounds 1\n") < 0) {
    _exit(2);
  }
  ::signal(signal, SIG_DFL);
  raise(signal);
}

class Fuzzer {
 public:
  // Calls made, by how they ended.
  struct Counts {
    std::uint64_t calls = 0;
    std::array<std::uint64_t, 7> by_status{};
    std::uint64_t compared = 0;
    std::uint64_t without_memory = 0;  // calls not made: the memory that they describe is not there
  };

  const Counts& counts() const { return counts_; }

  // "" or what was wrong.
  std::string round(Random random, bool cuda) {
    wrong_.clear();
    if (cuda) {
      random.once_in(2) ? on_device(random) : line_on_device(random);
      return wrong_;
    }
    if (random.once_in(1000)) {
      count(fovea_set_num_threads(static_cast<int>(random.between(-1, 3))));
    }
    switch (random.between(0, 39)) {
      case 0:
        lines(random);
        break;
      case 1:
        mask(random);
        break;
      case 2:
        rows(random);
        break;
      default:
        calls(random);
    }
    return wrong_;
  }

 private:
  fovea_status count(fovea_status status) {
    ++counts_.calls;
    ++counts_.by_status.at(static_cast<std::size_t>(status));
    if (status != FOVEA_OK && fovea_last_error()[0] == '\0') {
      say("a refusal without a message");
    }
    if (status == FOVEA_INTERNAL_ERROR || status == FOVEA_DEVICE_ERROR) {
      say(fmt::format("{}: {}", fovea_status_name(status), fovea_last_error()));
    }
    return status;
  }

  void say(const std::string& what) {
    if (wrong_.empty()) {
      wrong_ = what;
    }
  }

  // The same with the problem's line.
  void say_of_problem(Direction direction, const std::string& what) {
    std::array<char, 4096> line{};
    const bool is_described = fovea_describe(&subject_.problem(), static_cast<fovea_direction>(direction), line.data(),
                                             line.size(), nullptr) == FOVEA_OK;
    say(fmt::format("{} ({})", what, is_described ? line.data() : "no line"));
  }

  // ---- forward and backward ----

  void calls(Random& random) {
    const Direction direction = random.once_in(2) ? Direction::kForward : Direction::kBackward;
    subject_.draw(random, direction);
    if (direction == Direction::kBackward) {
      const std::uint64_t accumulate =
          std::exchange(subject_.problem().accumulate, 0);  // gradients, which a forward has not
      call(random, Direction::kForward, /*is_right=*/true);
      subject_.problem().accumulate = accumulate;
    }
    const bool is_right = random.once_in(2);
    for (std::int64_t i = is_right ? 0 : random.between(1, 3); i > 0; --i) {
      subject_.spoil(random);
    }
    if (!is_right && direction == Direction::kBackward) {
      subject_.set_incomparable();  // its out and lse are those of another problem: weights may exceed 1 by any factor
    }
    call(random, direction, is_right);
    if (random.once_in(16)) {
      text(random, direction);
    }
  }

  void call(Random& random, Direction direction, bool is_right) {
    constexpr double kMostWork = 1 << 22;
    fovea_problem& problem = subject_.problem();
    const bool forward = direction == Direction::kForward;
    if (!subject_.in_memory(/*lengths_only=*/true)) {
      ++counts_.without_memory;
      return;
    }
    std::size_t bytes = 0;
    const fovea_status planned = count(fovea_workspace(&problem, static_cast<fovea_direction>(direction), &bytes));
    if (planned == FOVEA_OK && static_cast<double>(bytes) > subject_.most_workspace()) {
      say_of_problem(direction, fmt::format("a workspace of {} bytes", bytes));
      return;
    }
    if (planned == FOVEA_OK &&
        (!subject_.in_memory(/*lengths_only=*/false) || subject_.work() > kMostWork || bytes > workspace_.size())) {
      ++counts_.without_memory;
      return;
    }
    std::size_t given = bytes;
    unsigned char* workspace = workspace_.end() - bytes;
    const bool is_short = bytes > 0 && random.once_in(20);
    if (is_short) {
      given = static_cast<std::size_t>(random.between(1, static_cast<std::int64_t>(bytes)) - 1);
      workspace = random.once_in(3) ? nullptr : workspace;
    }
    subject_.poison(direction);
    const auto run = [&](unsigned char* memory, std::size_t size) {
      return count(forward ? fovea_forward(&problem, memory, size) : fovea_backward(&problem, memory, size));
    };
    const fovea_status status = run(bytes > 0 ? workspace : nullptr, given);
    if (status != FOVEA_OK) {
      if (is_right && !is_short) {
        say_of_problem(direction, fmt::format("a right problem was refused: {}", fovea_last_error()));
      }
      if (subject_.in_memory(false) && !subject_.is_poisoned(direction)) {
        say(fmt::format("written before it was refused: {}", fovea_last_error()));
      }
      if (is_right && is_short) {
        run(workspace_.end() - bytes, bytes);  // a backward needs what its forward writes
      }
      return;
    }
    if (is_short) {
      say("computed in a workspace that is too small");
    }
    if (planned != FOVEA_OK) {
      say("computed, though fovea_workspace refused it");
    }
    const Subject::Bytes found = subject_.outputs(direction);
    if (!subject_.comparable() || !random.once_in(6)) {
      return;
    }
    const char* const backend = problem.backend;
    problem.backend = "reference";
    subject_.poison(direction);
    run(nullptr, 0);
    problem.backend = backend;
    ++counts_.compared;
    const std::string difference = subject_.difference(direction, found, subject_.outputs(direction));
    if (!difference.empty()) {
      say_of_problem(direction, difference);
    }
  }

  // What describe() says of a problem is a line that explain() understands.
  void text(Random& random, Direction direction) {
    if (!subject_.in_memory(/*lengths_only=*/true)) {
      return;
    }
    std::array<char, 4096> line{};
    const std::size_t capacity = random.once_in(4) ? static_cast<std::size_t>(random.between(0, 100)) : line.size();
    std::size_t needed = 0;
    if (count(fovea_describe(&subject_.problem(), static_cast<fovea_direction>(direction), line.data(), capacity,
                             &needed)) != FOVEA_OK ||
        needed > capacity) {
      return;
    }
    const char* backend = subject_.problem().backend;
    const bool is_known = backend == nullptr || std::strcmp(backend, "nothing") != 0;
    const fovea_status status = count(fovea_explain_line(line.data(), nullptr, 0, nullptr));
    if (is_known && status != FOVEA_OK && status != FOVEA_UNSUPPORTED) {
      say(fmt::format("described as '{}', of which explain says: {}", line.data(), fovea_last_error()));
    }
  }

  // ---- plans for a GPU ----

  // explain() of a problem that can be computed names a kernel, where scores are computed.
  void check_plan(const std::string& what, std::string_view text) {
    constexpr std::string_view kUsed = "cuda: used: ";
    const std::size_t at = text.find(kUsed);
    const std::string_view kernels =
        at == std::string_view::npos ? "" : text.substr(at + kUsed.size(), text.find('\n', at) - at - kUsed.size());
    if (kernels.find("generic_") == std::string_view::npos && kernels.find("sm90_") == std::string_view::npos &&
        what.find("need=sink") == std::string::npos && what.find(" hq=0 ") == std::string::npos) {
      say(fmt::format("a plan without a kernel: '{}' ({})", kernels, what));
    }
  }

  // The length of the longest sequence, which a caller must give for a device.
  static std::int64_t longest(const fovea_tensor& cu_seqlens) {
    std::int64_t most = 0;
    for (std::int64_t n = 0; n + 1 < cu_seqlens.shape[0]; ++n) {
      const auto at = [&](std::int64_t i) {
        i *= (cu_seqlens.flags & FOVEA_TENSOR_STRIDED) != 0 ? cu_seqlens.stride[0] : 1;
        return cu_seqlens.dtype == FOVEA_INT32 ? static_cast<const std::int32_t*>(cu_seqlens.data)[i]
                                               : static_cast<const std::int64_t*>(cu_seqlens.data)[i];
      };
      most = std::max<std::int64_t>(most, at(n + 1) - at(n));
    }
    return most;
  }

  void on_device(Random& random) {
    const Direction direction = random.once_in(2) ? Direction::kForward : Direction::kBackward;
    const auto which = static_cast<fovea_direction>(direction);
    subject_.draw(random, direction);
    fovea_problem& problem = subject_.problem();
    const bool is_right = random.once_in(2);
    for (std::int64_t i = is_right ? 0 : random.between(1, 3); i > 0; --i) {
      subject_.spoil(random);
    }
    problem.device = FOVEA_CUDA;
    problem.backend = nullptr;
    for (const auto& [cu_seqlens, most] : {std::pair(problem.cu_seqlens_q, &problem.max_seqlen_q),
                                           std::pair(problem.cu_seqlens_k, &problem.max_seqlen_k)}) {
      if (is_right && cu_seqlens != nullptr && *most == 0) {  // nobody reads lengths there
        *most = longest(*cu_seqlens);
        if (*most == 0) {
          return;  // 0 is refused: it would mean that it was not said
        }
      }
    }
    std::array<char, 8192> text{};
    std::size_t bytes = 0;
    const fovea_status planned = count(fovea_workspace(&problem, which, &bytes));
    if (planned != FOVEA_OK && planned != FOVEA_UNSUPPORTED && is_right) {
      say_of_problem(direction, fmt::format("a right problem was refused: {}", fovea_last_error()));
    }
    const fovea_status explained = count(fovea_explain(&problem, which, text.data(), text.size(), nullptr));
    if (explained != planned) {
      say_of_problem(direction,
                     fmt::format("fovea_workspace ended with {}, fovea_explain with {}: {}", fovea_status_name(planned),
                                 fovea_status_name(explained), fovea_last_error()));
    }
    if (planned != FOVEA_OK) {
      return;
    }
    check_plan(text.data(), text.data());
    const fovea_status prepared = count(fovea_prepare(&problem, which));
    const bool forward = direction == Direction::kForward;
    const fovea_status ran =
        count(forward ? fovea_forward(&problem, &problem, bytes) : fovea_backward(&problem, &problem, bytes));
    if (is_right && (prepared != FOVEA_OK || ran != FOVEA_OK)) {
      say_of_problem(direction, fmt::format("planned, but: {}", fovea_last_error()));
    }
  }

  // Larger problems than there is memory for.
  void line_on_device(Random& random) {
    const auto size = [&](std::int64_t most) {
      const std::int64_t n = random.between(1, random.pick({std::int64_t{3}, std::int64_t{100}, most}));
      return random.once_in(2) ? n : (n + 63) / 64 * 64;
    };
    const bool backward = random.once_in(2);
    const std::int64_t heads_k = random.pick({1, 2, 3, 4, 8, 16});
    const bool two_levels = random.once_in(6);
    const std::string batch = two_levels ? fmt::format("{}x{}", size(9), size(40)) : fmt::format("{}", size(300));
    const std::int64_t head_dim =
        random.once_in(3) ? size(600) : random.pick({16, 32, 40, 64, 80, 96, 128, 160, 192, 256});
    std::string line =
        fmt::format("{} b={} hq={} hk={} d={} {} device=cuda", backward ? "bwd" : "fwd", batch,
                    heads_k * random.pick({1, 1, 2, 8}), heads_k, head_dim, random.pick({"bf16", "fp16", "fp32"}));
    const auto sometimes = [&](std::int64_t n, const std::string& words) {
      const bool taken = random.once_in(n);
      line += taken ? " " + words : "";
      return taken;
    };
    const std::int64_t queries = size(70'000);
    const std::int64_t keys = random.once_in(2) ? queries : size(70'000);
    line += fmt::format(" sq={} sk={}", queries, keys);
    sometimes(5, fmt::format("dv={}", size(400)));
    sometimes(3, "causal");
    sometimes(4, fmt::format("window={},{}", random.between(-1, 300), random.between(-1, 300)));
    sometimes(4, "align=tl");
    const auto plane = [&] {
      std::string extents = two_levels ? random.pick({"b1,b2", "b1,1", "1,b2", "1,1"}) : random.pick({"b", "1"});
      for (const char* const dim : {"h", "q", "k"}) {
        extents += std::string(",") + (random.once_in(2) ? dim : "1");
      }
      return extents;
    };
    const auto type = [&] { return random.pick({"bf16", "fp16", "fp32"}); };
    const bool bias = sometimes(3, fmt::format("bias={}:{}", plane(), type()));
    const bool bias2 = bias && sometimes(3, fmt::format("bias2={}:{}", plane(), type()));
    sometimes(4, fmt::format("mask={}", plane()));
    if (sometimes(4, fmt::format("dropout={}", random.pick({"0.1", "0.5", "0.9"})))) {
      sometimes(4, "rng=torch_mem_efficient");
    }
    sometimes(6, "alibi=h");
    sometimes(6, "softcap=30");
    const bool sink = sometimes(6, "sink");
    sometimes(6, "det");
    sometimes(8, fmt::format("layout={}", random.pick({"bhsd", "bshd"})));
    sometimes(12, fmt::format("scale={}", random.pick({"-0.3", "0.125", "1e-40", "1e9"})));
    if (backward) {
      std::string need;
      const auto ask = [&](bool there, const char* name) {
        if (there && !random.once_in(4)) {
          need += std::string(need.empty() ? "" : ",") + name;
        }
      };
      ask(true, "q");
      ask(true, "k");
      ask(true, "v");
      ask(bias, "bias");
      ask(bias2, "bias2");
      ask(sink, "sink");
      line += need.empty() ? " need=q" : " need=" + need;
      sometimes(5, "dlse");
    } else {
      sometimes(2, "lse");
    }
    std::array<char, 8192> text{};
    const fovea_status status = count(fovea_explain_line(line.c_str(), text.data(), text.size(), nullptr));
    if (status == FOVEA_OK) {
      check_plan(line, text.data());
    } else if (std::strstr(fovea_last_error(), "blocks; accepted: at most") == nullptr &&
               std::strstr(fovea_last_error(), "at most 2^50") == nullptr) {  // there are limits
      say(fmt::format("'{}': {}", line, fovea_last_error()));
    }
  }

  // ---- the rest ----

  void lines(Random& random) {
    constexpr std::array<const char*, 24> kWords = {"fwd",
                                                    "bwd",
                                                    "b=2x3",
                                                    "sq=5",
                                                    "sk=99999999999",
                                                    "d=8",
                                                    "hq=4",
                                                    "hk=2",
                                                    "seqs_q=1x9,3",
                                                    "causal",
                                                    "align=tl",
                                                    "window=-1,4",
                                                    "bias=1,1,q,k:bf16",
                                                    "mask=b1,1,1,k",
                                                    "need=q,bias",
                                                    "dropout=0.5",
                                                    "seed=0xfe",
                                                    "layout=qkv3",
                                                    "used_k",
                                                    "max_q=7",
                                                    "total_q=9",
                                                    "dlse",
                                                    "backend=reference",
                                                    "device=cuda"};
    std::string line;
    for (std::int64_t i = random.between(0, 9); i > 0; --i) {
      line += kWords[random.next() % kWords.size()];
      line += ' ';
    }
    if (random.once_in(3) && !line.empty()) {
      line[random.next() % line.size()] = static_cast<char>(random.between(1, 127));
    }
    std::array<char, 64> text{};
    count(fovea_explain_line(line.c_str(), text.data(), text.size(), nullptr));
    count(fovea_explain_for(line.c_str(), "sm_90", text.data(), text.size(), nullptr));
    if (text.back() != '\0') {
      say("text without an end");
    }
  }

  void mask(Random& random) {
    const auto size = [&] { return random.once_in(20) ? random.between(-2, 1) << 40 : random.between(0, 9); };
    const std::array<std::int64_t, 4> shape{size(), size(), size(), size()};
    std::int64_t elements = 1;
    for (const std::int64_t dim : shape) {
      elements *= dim >= 0 && dim < 10 ? dim : 0;
    }
    const bool is_right = std::all_of(shape.begin(), shape.end(), [](std::int64_t n) { return n >= 0 && n < 10; });
    if (!is_right && std::find(shape.begin(), shape.end(), 0) == shape.end() && shape[0] > 0 && shape[1] > 0 &&
        shape[2] > 0 && shape[3] > 0) {
      return;  // it may be right on a machine with so much memory
    }
    unsigned char* end = workspace_.end();
    const auto status =
        count(fovea_dropout_mask(shape[0], shape[1], shape[2], shape[3], random.uniform(), random.next(), random.next(),
                                 static_cast<fovea_rng>(random.between(0, 1)), end - elements));
    if (is_right && status != FOVEA_OK) {
      say(fmt::format("a right mask was refused: {}", fovea_last_error()));
    }
  }

  // Plans of rows: right ones have every row once, refused ones write nothing.
  void rows(Random& random) {
    std::vector<std::int64_t> lengths;
    for (std::int64_t n = random.once_in(2) ? 1 : random.between(0, 20); n > 0; --n) {
      lengths.push_back(random.between(0, random.pick({3, 300, 20000})));
    }
    if (lengths.size() == 1 && random.once_in(4)) {
      lengths[0] = (std::int64_t{1} << 31) - lengths[0];  // as many as there may be, and pairs of nearly 2^62
    }
    fovea_rows asked{};
    asked.size = sizeof(asked);
    asked.sequences = static_cast<std::int64_t>(lengths.size());
    asked.kind = asked.sequences == 1 ? static_cast<std::int32_t>(random.between(0, 2))
                                      : static_cast<std::int32_t>(random.between(1, 2));
    asked.flags = random.pick({0u, FOVEA_CAUSAL, FOVEA_WINDOW, FOVEA_CAUSAL | FOVEA_WINDOW});
    asked.ranks = random.between(1, random.pick({3, 70}));
    asked.head_ranks = random.between(0, 4);
    asked.block = random.pick<std::int64_t>({0, 1, 16, 128, 1 << 20});
    asked.lengths = lengths.data();
    asked.window_left = random.between(-1, 400);
    asked.window_right = random.between(-1, 400);
    const std::int64_t ranks = asked.ranks * std::max<std::int64_t>(1, asked.head_ranks);
    const std::int64_t most = 2 * asked.sequences * ranks;
    if (random.once_in(3)) {  // spoilt; no more memory is needed than for what is right
      const std::int64_t strange = random.pick<std::int64_t>({-1, 0, -(std::int64_t{1} << 40), INT64_MIN, INT64_MAX});
      std::int64_t* const fields[] = {&asked.ranks,     &asked.head_ranks,  &asked.block,
                                      &asked.sequences, &asked.window_left, &asked.window_right};
      switch (random.between(0, 3)) {
        case 0:
          *fields[random.next() % std::size(fields)] = strange;
          break;
        case 1:
          asked.kind = static_cast<std::int32_t>(random.next());
          break;
        case 2:
          asked.flags = static_cast<std::uint32_t>(random.next());
          break;
        default:
          if (!lengths.empty()) {
            lengths[random.next() % lengths.size()] = strange;
          }
      }
    }
    constexpr std::int64_t kUnwritten = 0x5A5A5A5A5A5A5A5A;
    const auto counted = static_cast<std::size_t>(ranks), pieces = static_cast<std::size_t>(3 * most);
    auto* const end = reinterpret_cast<std::int64_t*>(workspace_.end());  // a page that nothing may touch
    std::int64_t* const first = end - (5 * counted + pieces + 1);
    std::fill(first, end, kUnwritten);
    asked.rows = first;
    asked.pairs = first + counted;
    asked.sends = first + 2 * counted;
    asked.receives = first + 3 * counted;
    asked.piece_counts = first + 4 * counted;
    asked.balance = reinterpret_cast<double*>(first + 5 * counted);
    asked.pieces = end - pieces;
    asked.piece_capacity = most;
    const bool is_spoilt_in_size =
        asked.ranks * std::max<std::int64_t>(1, std::min<std::int64_t>(asked.head_ranks, 99)) != ranks;
    if (is_spoilt_in_size && asked.ranks > 0 && asked.ranks <= 65536) {
      return;  // right, for other arrays than these
    }
    if (count(fovea_rows_plan(&asked, nullptr)) != FOVEA_OK) {
      if (std::any_of(first, end, [](std::int64_t number) { return number != kUnwritten; })) {
        say("a refused plan of rows wrote something");
      }
      return;
    }
    const std::int64_t of_ranks = std::accumulate(asked.rows, asked.rows + ranks, std::int64_t{0});
    std::int64_t of_pieces = 0;
    const std::int64_t planned = std::accumulate(asked.piece_counts, asked.piece_counts + ranks, std::int64_t{0});
    for (std::int64_t n = 0; n < planned; ++n) {
      of_pieces += asked.pieces[3 * n + 2];
    }
    const std::int64_t now = std::accumulate(lengths.begin(), lengths.begin() + asked.sequences, std::int64_t{0});
    if (of_ranks != now || of_pieces != now || !(*asked.balance >= 1)) {
      say(fmt::format("a plan of {} rows has {}, its pieces {}; balance {}", now, of_ranks, of_pieces, *asked.balance));
    }
  }

  Subject subject_;
  Guarded workspace_{std::size_t{1} << 28};
  Counts counts_;
  std::string wrong_;
};

int run(std::uint64_t seed, std::uint64_t from, std::uint64_t rounds, std::uint64_t calls, double seconds, bool cuda) {
  for (const int signal : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT}) {
    ::signal(signal, say_round);
  }
  Fuzzer fuzzer;
  std::uint64_t wrong = 0;
  std::uint64_t round = from;
  running_seed = seed;
  const auto start = std::chrono::steady_clock::now();
  const auto elapsed = [&] { return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(); };
  const auto goes_on = [&] {
    return (rounds == 0 || round - from < rounds) && (calls == 0 || fuzzer.counts().calls < calls) &&
           (seconds == 0 || round % 64 != 0 || elapsed() < seconds);
  };
  for (; goes_on(); ++round) {
    running_round = round;
    const std::string what = fuzzer.round(Random(seed, round), cuda);
    if (!what.empty()) {
      fmt::print("--seed {} --from {} --rounds 1{}: {}\n", seed, round, cuda ? " --cuda" : "", what);
      if (++wrong == 20) {
        break;
      }
    }
  }
  const Fuzzer::Counts& counts = fuzzer.counts();
  fmt::print("seed {}, rounds {} to {}, {:.0f} seconds: {} calls", seed, from, round, elapsed(), counts.calls);
  for (std::size_t status = 0; status < counts.by_status.size(); ++status) {
    fmt::print(", {} {}", counts.by_status[status], fovea_status_name(static_cast<fovea_status>(status)));
  }
  fmt::print("; {} compared with the reference, {} not made for want of the memory they describe; {} wrong\n",
             counts.compared, counts.without_memory, wrong);
  return wrong == 0 ? 0 : 1;
}

}  // namespace
}  // namespace fovea::fuzz

int main(int argc, char** argv) {
  CLI::App app("Random and hostile calls of the C ABI; ends with 1 on a wrong answer.");
  std::uint64_t seed = static_cast<std::uint64_t>(std::chrono::system_clock::now().time_since_epoch().count());
  std::uint64_t from = 0;
  std::uint64_t rounds = 0;
  std::uint64_t calls = 0;
  double seconds = 0;
  app.add_option("--seed", seed, "which run (by default the clock's)");
  app.add_option("--from", from, "its first round");
  app.add_option("--rounds", rounds, "end after so many rounds");
  app.add_option("--calls", calls, "end after so many calls of the library");
  bool cuda = false;
  app.add_flag("--cuda", cuda, "plans and launches for the GPU that is seen: a played one");
  app.add_option("--seconds", seconds, "end after so many seconds");
  CLI11_PARSE(app, argc, argv);
  if (rounds == 0 && calls == 0 && seconds == 0) {
    seconds = 10;
  }
  return fovea::fuzz::run(seed, from, rounds, calls, seconds, cuda);
}
