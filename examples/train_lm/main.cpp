// SPDX-License-Identifier: Apache-2.0
//
// train_lm: trains a small byte-level transformer whose attention, forward and backward, is fovea's, and shows what
// came of it: held-out loss beside byte counts' and beside the same network without attention, a sample, a curve.
//
//     data          the text, what of it is held out, the byte-count models
//     model         the transformer and its gradients          attention_layer   what calls fovea
//     optimizer     Muon and AdamW                             train             the loop, timing, sampling
//     plot          the curve as SVG and as text               gradient_check    --check-gradients
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <fstream>
#include <map>
#include <numbers>
#include <optional>
#include <stdexcept>
#include <string>

#include "data.h"
#include "gradient_check.h"
#include "model.h"
#include "parallel.h"
#include "plot.h"
#include "train.h"

namespace {

using namespace train_lm;

struct Settings {
  std::filesystem::path text = "/usr/share/common-licenses";
  double held_out = 0.1;
  ModelConfig model;
  TrainConfig train;
  int threads = 0;
  std::filesystem::path out = "build/demo";
  std::string prompt;
  std::int64_t sample_bytes = 500;
  double temperature = 0.7;
  bool comparisons = true;
  bool check_gradients = false;
  int must_beat = -1;
};

// A run without attention learns what the last byte tells about the next, and then nothing: it needs no more.
constexpr std::int64_t kShareOfStepsWithoutAttention = 6;

template <class... Args>
void say(fmt::format_string<Args...> format, Args&&... args) {
  fmt::print(format, std::forward<Args>(args)...);
  std::fflush(stdout);
}

std::string clock_text(double seconds) {
  const auto whole = static_cast<std::int64_t>(seconds + 0.5);
  return fmt::format("{}:{:02}", whole / 60, whole % 60);
}

// Whatever bytes the network makes, a terminal gets text.
std::string printable(const std::string& bytes) {
  std::string text;
  for (const char c : bytes) {
    text += c == '\n' || (c >= ' ' && c <= '~') ? c : '.';
  }
  return text;
}

void write_file(const std::filesystem::path& path, const std::string& content) {
  std::ofstream file(path, std::ios::binary);
  file << content;
  if (!file.flush()) {
    throw std::runtime_error(fmt::format("{}: cannot be written", path.string()));
  }
}

void print_corpus(const Corpus& corpus) {
  say("text           bytes  trained on    held out\n");
  for (const Document& document : corpus.documents()) {
    const auto size = static_cast<std::int64_t>(document.bytes.size());
    say("{:<14}{:>6}  [0, {:>6}) [{:>6}, {:>6})\n", document.name, size, document.train_bytes, document.train_bytes,
        size);
  }
  say("together: {} bytes to train on, {} held out\n\n", corpus.train_bytes(), corpus.held_out_bytes());
}

void print_progress(const Progress& p) {
  if (p.step == 1) {
    say("{:>6} {:>5} {:>8} {:>10} {:>9} {:>10} {:>7} {:>7}\n", "step", "done", "train", "held-out*", "bytes/s",
        "attention", "time", "left");
  }
  // From the start alone nothing can be said about the end.
  const std::string left = p.done > 0.01 ? clock_text(p.seconds / p.done * (1 - p.done)) : "";
  say("{:>6} {:>4.0f}% {:>8.4f} {:>10.4f} {:>9.0f} {:>9.0f}% {:>7} {:>7}\n", p.step, 100 * p.done, p.train_loss,
      p.held_out_loss, p.bytes_per_second, 100 * p.attention_share, clock_text(p.seconds), left);
}

// The end of what is trained on of the longest document: the sample goes on where the held-out bytes would begin.
std::string default_prompt(const Corpus& corpus) {
  const Document& longest =
      *std::max_element(corpus.documents().begin(), corpus.documents().end(),
                        [](const Document& a, const Document& b) { return a.bytes.size() < b.bytes.size(); });
  constexpr std::int64_t kLongest = 160;
  const std::int64_t begin = std::max<std::int64_t>(longest.train_bytes - kLongest, 0);
  return {longest.bytes.begin() + begin, longest.bytes.begin() + longest.train_bytes};
}

int run_gradient_check() {
  bool passed = true;
  for (const AttentionKind kind : {AttentionKind::kFovea, AttentionKind::kNaive, AttentionKind::kNone}) {
    say("attention {}: gradients against difference quotients, in double precision\n", name_of(kind));
    for (const GradientError& error : check_gradients(kind)) {
      const bool good = error.largest_error < kGradientTolerance;
      passed = passed && good;
      say("  {:<14} largest gradient {:.3e}  largest error {:.1e}  {}\n", error.parameter, error.largest_gradient,
          error.largest_error, good ? "ok" : "WRONG");
    }
  }
  say("{}\n", passed ? "all gradients are right" : "there are wrong gradients");
  return passed ? 0 : 1;
}

struct Results {
  Run main;
  double loss = 0;
  std::vector<double> counts;  // by order
  std::optional<Run> without_attention;
  double loss_without_attention = 0;
  std::vector<StepTime> step_times;  // fovea, naive
};

std::string table_of(const Results& r, const Settings& settings) {
  std::string table;
  const auto line = [&](const std::string& what, const std::string& loss, const std::string& speed) {
    table += fmt::format("{:<62} {:>9} {:>9}\n", what, loss, speed);
  };
  const auto nats = [](double value) { return fmt::format("{:.3f}", value); };
  line("", "held-out", "training");
  line("", "nats/byte", "bytes/s");
  const auto speed_of = [&](const StepTime& time) {
    return fmt::format("{:.0f}", static_cast<double>(settings.train.rows * settings.model.context) / time.seconds);
  };
  line(
      fmt::format("transformer, attention by {}, {} steps", name_of(settings.model.attention), r.main.steps),
      nats(r.loss),
      r.step_times.empty() ? fmt::format("{:.0f}", r.main.reports.back().bytes_per_second) : speed_of(r.step_times[0]));
  if (!r.step_times.empty()) {
    line("  the same training with naive S x S attention (+)", "", speed_of(r.step_times[1]));
  }
  if (r.without_attention) {
    line(fmt::format("  the same with attention's output zeroed, only {} steps (*)", r.without_attention->steps),
         nats(r.loss_without_attention), "");
  }
  for (std::size_t order = 1; order < r.counts.size(); ++order) {
    line(fmt::format("byte counts, order {} (the {} before it), interpolated", order,
                     order == 1 ? "byte" : fmt::format("{} bytes", order)),
         nats(r.counts[order]), "");
  }
  if (!r.step_times.empty()) {
    table += "(+) Its dropout masks are given to it: the time that they take is not counted.\n";
  }
  if (r.without_attention) {
    table += "(*) Without attention a prediction knows one byte, so order 1 is about what more steps could reach.\n";
  }
  return table;
}

Figure figure_of(const Results& r) {
  Figure figure;
  figure.title = "A byte-level transformer, attention by fovea";
  figure.x_label = "step";
  figure.y_label = "nats a byte";
  const auto add_curve = [&](const std::string& name, const Run& run, double Progress::*loss) {
    Curve curve{name, {}};
    for (const Progress& p : run.reports) {
      if (p.done > 0.02) {  // it begins at ln 256, beside which everything else would be a flat line
        curve.points.push_back({static_cast<double>(p.step), p.*loss});
      }
    }
    figure.curves.push_back(curve);
  };
  add_curve("training", r.main, &Progress::train_loss);
  add_curve("held-out", r.main, &Progress::held_out_loss);
  if (r.without_attention) {
    add_curve("zeroed attention, held-out", *r.without_attention, &Progress::held_out_loss);
  }
  figure.levels.push_back({"order-3 byte counts", r.counts.at(3)});
  return figure;
}

std::string csv_of(const Run& run) {
  std::string csv =
      "step,seconds,train_nats_per_byte,held_out_estimate_nats_per_byte,bytes_per_second,attention_share\n";
  for (const Progress& p : run.reports) {
    csv += fmt::format("{},{:.2f},{:.5f},{:.5f},{:.0f},{:.3f}\n", p.step, p.seconds, p.train_loss, p.held_out_loss,
                       p.bytes_per_second, p.attention_share);
  }
  return csv;
}

int run(const Settings& settings) {
  const Corpus corpus = Corpus::load(settings.text, settings.held_out);
  std::filesystem::create_directories(settings.out);
  print_corpus(corpus);

  Results results;
  constexpr int kHighestOrder = 5;
  for (int order = 0; order <= std::max(kHighestOrder, settings.must_beat); ++order) {
    results.counts.push_back(count_model_loss(corpus, order));
  }
  Model<float> model(settings.model);
  say("transformer: {} layers, width {}, {} heads, context {}, {} parameters; attention by {} on {} threads, "
      "dropout {:g}\n",
      settings.model.layers, settings.model.width, settings.model.heads, settings.model.context,
      model.parameters().size(), name_of(settings.model.attention), threads(), settings.model.dropout);
  say("at most {} steps of {} x {} bytes, at most {}\n\n", settings.train.steps, settings.train.rows,
      settings.model.context, clock_text(settings.train.seconds));
  results.main = train(model, corpus, settings.train, print_progress);
  say("(* on an eighth of the held-out bytes)\n");
  results.loss = held_out_loss(model, corpus);
  say("\nheld-out loss over all {} bytes: {:.4f} nats a byte = {:.4f} bits\n", corpus.held_out_bytes(), results.loss,
      results.loss / std::numbers::ln2);

  const std::string prompt = settings.prompt.empty() ? default_prompt(corpus) : settings.prompt;
  const std::string continuation =
      sample(model, prompt, settings.sample_bytes, settings.temperature, settings.train.seed);
  const std::string shown = printable(prompt) + "[[" + printable(continuation) + "]]\n";
  say("\n---- what it writes (in double brackets) after the text before them ----\n{}\n", shown);

  if (settings.comparisons) {
    say("the same network with attention's output zeroed ...\n");
    ModelConfig without = settings.model;
    without.attention = AttentionKind::kNone;
    Model<float> ablated(without);
    TrainConfig shorter = settings.train;
    shorter.steps = std::max<std::int64_t>(1, results.main.steps / kShareOfStepsWithoutAttention);
    results.without_attention = train(ablated, corpus, shorter, [](const Progress&) {});
    results.loss_without_attention = held_out_loss(ablated, corpus);

    say("the speed of training with fovea and with naive attention ...\n");
    ModelConfig naive = settings.model;
    naive.attention = AttentionKind::kNaive;
    constexpr std::int64_t kRounds = 5;
    constexpr std::int64_t kSteps = 4;
    results.step_times = time_steps({settings.model, naive}, corpus, settings.train, kRounds, kSteps);
    say("after {} steps of each the losses are {:.5f} and {:.5f}\n\n", kRounds * kSteps + 1,
        results.step_times[0].last_loss, results.step_times[1].last_loss);
  }
  const Figure figure = figure_of(results);
  const std::string table = table_of(results, settings);
  say("{}\n{}\n", to_text(figure, 100, 22), table);
  write_file(settings.out / "loss.svg", to_svg(figure));
  write_file(settings.out / "loss.csv", csv_of(results.main));
  write_file(settings.out / "sample.txt", shown);
  write_file(settings.out / "table.txt", table);
  say("written to {}: loss.svg, loss.csv, sample.txt, table.txt\n", settings.out.string());
  constexpr int kOrderOfVerdict = 3;
  const int order = settings.must_beat >= 0 ? settings.must_beat : kOrderOfVerdict;
  const bool below = results.loss < results.counts.at(order);
  say("{:.3f} nats a byte is {} the order-{} model's {:.3f}\n", results.loss, below ? "below" : "NOT BELOW", order,
      results.counts.at(order));
  return below || settings.must_beat < 0 ? 0 : 1;
}

void add_options(CLI::App& app, Settings& s) {
  app.add_option("--text", s.text, "A file, or a folder whose regular files are taken in the order of their names")
      ->group("Text")
      ->capture_default_str();
  app.add_option("--held-out", s.held_out, "The share of each file, at its end, that is held out")
      ->group("Text")
      ->check(CLI::Range(0.001, 0.9))
      ->capture_default_str();

  const std::map<std::string, AttentionKind> kinds = {
      {"fovea", AttentionKind::kFovea}, {"naive", AttentionKind::kNaive}, {"none", AttentionKind::kNone}};
  app.add_option("--attention", s.model.attention,
                 "fovea, naive (S x S matrices) or none (its output zeroed; the network is otherwise the same)")
      ->group("Network")
      ->transform(CLI::CheckedTransformer(kinds, CLI::ignore_case).description(""));
  app.add_option("--layers", s.model.layers, "Layers")
      ->group("Network")
      ->check(CLI::Range(1, 64))
      ->capture_default_str();
  app.add_option("--width", s.model.width, "Numbers a byte between layers, a multiple of --heads")
      ->group("Network")
      ->check(CLI::Range(1, 4096))
      ->capture_default_str();
  app.add_option("--heads", s.model.heads, "Heads of attention")
      ->group("Network")
      ->check(CLI::Range(1, 256))
      ->capture_default_str();
  app.add_option("--context", s.model.context, "Bytes that a prediction can look back on")
      ->group("Network")
      ->check(CLI::Range(4, 65536))
      ->capture_default_str();
  app.add_option("--dropout", s.model.dropout, "Probability of dropping an attention weight")
      ->group("Network")
      ->check(CLI::Range(0.0, 0.99))
      ->capture_default_str();

  app.add_option("--steps", s.train.steps, "End after so many steps ...")
      ->group("Training")
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 40))
      ->capture_default_str();
  app.add_option("--seconds", s.train.seconds,
                 "... or so many seconds. A run that its steps end is the same every time, to the last bit")
      ->group("Training")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--batch", s.train.rows, "Windows of --context bytes in a step")
      ->group("Training")
      ->check(CLI::Range(1, 65536))
      ->capture_default_str();
  app.add_option("--matrix-rate", s.train.optimizer.matrix_rate, "Muon's learning rate, of the linear maps")
      ->group("Training")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--learning-rate", s.train.optimizer.learning_rate, "AdamW's learning rate, of everything else")
      ->group("Training")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--weight-decay", s.train.optimizer.weight_decay, "Of the linear maps")
      ->group("Training")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  app.add_option("--seed", s.train.seed, "Of initial parameters, batches, dropout and sample")
      ->group("Training")
      ->capture_default_str();
  app.add_option("--threads", s.threads, "0: as many as this process may use")
      ->group("Training")
      ->check(CLI::Range(0, 4096))
      ->capture_default_str();

  app.add_option("--output", s.out, "Folder for loss.svg, loss.csv, sample.txt and table.txt")
      ->group("Results")
      ->capture_default_str();
  app.add_option("--prompt", s.prompt, "What the sample continues; by default what stands before held-out bytes")
      ->group("Results");
  app.add_option("--sample", s.sample_bytes, "Bytes to write")
      ->group("Results")
      ->check(CLI::Range(0, 1 << 20))
      ->capture_default_str();
  app.add_option("--temperature", s.temperature, "Below 1 the sample keeps closer to what is likeliest")
      ->group("Results")
      ->check(CLI::Range(0.01, 10.0))
      ->capture_default_str();
  app.add_flag("!--no-comparisons", s.comparisons, "Skip the runs with zeroed and with naive attention")
      ->group("Results");
  app.add_option("--must-beat", s.must_beat, "Exit with 1 unless the loss ends below the byte counts of this order")
      ->group("Results")
      ->check(CLI::Range(0, 8));
  app.add_flag("--check-gradients", s.check_gradients, "Only compare all gradients with difference quotients, and exit")
      ->group("Results");
}

}  // namespace

int main(int argc, char** argv) {
  Settings settings;
  CLI::App app(
      "Trains a byte-level transformer on real text with fovea's attention, forward and backward: causal, with\n"
      "dropout and a learnable bias for each distance, whose gradient fovea sums over the batch.\n");
  app.footer(
      "Examples:\n"
      "  train_lm                                         the demo: Debian's licences, about three minutes\n"
      "  train_lm --text book.txt --seconds 600 --steps 6000\n"
      "  train_lm --steps 200 --no-comparisons            the same every time, to the last bit\n"
      "  train_lm --context 1024 --batch 2 --attention naive\n"
      "  train_lm --check-gradients\n"
      "Exit codes: 0 done; 1 a check failed (--must-beat, --check-gradients) or the run could not be done; "
      "100 and above: the command line.");
  add_options(app, settings);
  CLI11_PARSE(app, argc, argv);
  try {
    if (settings.model.width % settings.model.heads != 0) {
      throw std::runtime_error(
          fmt::format("--width {} is not a multiple of --heads {}", settings.model.width, settings.model.heads));
    }
    settings.model.seed = settings.train.seed;
    fovea::set_num_threads(settings.threads);
    set_threads(fovea::num_threads());
    return settings.check_gradients ? run_gradient_check() : run(settings);
  } catch (const std::exception& error) {
    fmt::print(stderr, "train_lm: {}\n", error.what());
    return 1;
  }
}
