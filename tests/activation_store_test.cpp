// ActivationStore: what the forward saved comes back in the backward, under every policy, and nothing else moves.
#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include "gate.hpp"
#include "hbmoff/training/activation_store.hpp"
#include "support/activation_model.hpp"
#include "support/logging_device.hpp"
#include "support/watchdog.hpp"

using namespace activation_test;

namespace {

using Modes = SaveMode (*)(std::uint32_t layer, std::uint32_t tensor);

constexpr SaveMode keep = SaveMode::keep, offload = SaveMode::offload, recompute = SaveMode::recompute;

/// Keeps, offloads and recomputes within one layer.
struct OneOfEach {
  [[nodiscard]] SaveMode save(const TensorInfo& info) const {
    return info.name == "mask" ? recompute : info.name == "statistics" ? keep : offload;
  }
};

// Several micro-batches, whole and short, with evaluations in between; what is missing is what was recomputed and has
// left its slot.
template <std::uint32_t Depth, class Policy>
void check_store(Policy policy, std::uint32_t layers, Modes modes, std::uint32_t run_time_depth = 3) {
  const std::uint32_t depth = Depth == dynamic_depth ? run_time_depth : Depth;
  INFO("depth ", depth, ", layers ", layers);
  const BundleLayout layout = layer_layout();
  Bench bench;
  ActivationStore<LoggingDevice, Policy, Depth> store{bench.hbm, bench.host, policy,
                                                      layers,    layout,     {.depth = depth, .fill_evicted = true}};
  CHECK(store.layers() == layers);

  std::vector<std::uint32_t> paged;
  for (std::uint32_t l = 0; l < layers; ++l) {
    for (std::uint32_t i = 0; i < tensor_count; ++i) {
      if (i != empty && modes(l, i) != keep) {
        paged.push_back(l);
        break;
      }
    }
  }
  const auto in_slot = [&](std::uint32_t l) {
    const auto found = std::find(paged.begin(), paged.end(), l);
    return found != paged.end() && static_cast<std::size_t>(paged.end() - found) <= depth;
  };
  const auto missing = [&](std::uint32_t l, std::uint32_t i) { return modes(l, i) == recompute && !in_slot(l); };

  std::uint64_t pass = 0;
  for (const std::uint64_t rows : {6u, 6u, 1u, 4u, 6u, 2u}) {
    ++pass;
    run_forward(bench.device, bench.stream, store, layout, pass, rows);
    run_backward(bench.device, bench.stream, store, layout, pass, rows, missing);
    if (pass % 2 == 0) {
      run_forward(bench.device, bench.stream, store, layout, 1000 + pass, pass == 2 ? 6 : 3, false);
    } else {
      run_forward(bench.device, bench.stream, store, layout, 1000 + pass, 6);  // committed, but no backward follows
    }
  }
  bench.device.synchronize(bench.stream);
}

}  // namespace

TEST_CASE("contents survive under every policy") {
  const Watchdog watchdog{"policies", std::chrono::seconds{120}};
  check_store<3>(KeepResident{}, 9, [](auto, auto) { return keep; });
  check_store<3>(OffloadOptimizerState{}, 9, [](auto, auto) { return keep; });
  check_store<3>(OffloadAll{}, 9, [](auto, auto) { return offload; });
  check_store<3>(OffloadActivations{}, 9, [](auto, auto) { return offload; });
  check_store<3>(OffloadMatching{{"hidden*", "input"}}, 9,
                 [](auto, auto i) { return i == mask || i == statistics || i == empty ? keep : offload; });
  check_store<3>(OffloadLargerThan{300_B}, 9,
                 [](auto, auto i) { return i == hidden || i == hidden_view ? offload : keep; });
  check_store<3>(KeepLastLayers{2}, 9, [](auto l, auto) { return l >= 7 ? keep : offload; });
  check_store<3>(KeepLastLayers{9}, 9, [](auto, auto) { return keep; });
  check_store<3>(KeepLastLayers{100}, 9, [](auto, auto) { return keep; });
  check_store<3>(RecomputeFirstLayers{4}, 9, [](auto l, auto i) { return l < 4 && i != input ? recompute : keep; });
  check_store<3>(RecomputeFirstLayers{5, OffloadAll{}}, 9,
                 [](auto l, auto i) { return l < 5 && i != input ? recompute : offload; });
  check_store<3>(RecomputeMatching{{"mask", "hid*"}, OffloadAll{}}, 9,
                 [](auto, auto i) { return i == mask || i == hidden || i == hidden_view ? recompute : offload; });
  check_store<3>(RecomputeMatching{{"*"}}, 9, [](auto, auto i) { return i == input ? keep : recompute; });
  check_store<3>(KeepLastLayers{2, RecomputeMatching{{"*"}, OffloadAll{}}}, 9, [](auto l, auto i) {
    return l >= 7 ? keep : i == input ? offload : recompute;
  });
  check_store<3>(OneOfEach{}, 9, [](auto, auto i) { return i == mask ? recompute : i == statistics ? keep : offload; });
}

TEST_CASE("contents survive at every depth, with fewer and many more layers than slots") {
  const Watchdog watchdog{"depths", std::chrono::seconds{120}};
  const Modes one_of_each = [](std::uint32_t, std::uint32_t i) {
    return i == mask ? recompute : i == statistics ? keep : offload;
  };
  for (const std::uint32_t layers : {1u, 2u, 4u, 5u, 11u}) {
    check_store<1>(OneOfEach{}, layers, one_of_each);
    check_store<2>(OneOfEach{}, layers, one_of_each);
    check_store<3>(OneOfEach{}, layers, one_of_each);
    check_store<4>(OneOfEach{}, layers, one_of_each);
    check_store<dynamic_depth>(OneOfEach{}, layers, one_of_each, 2);
    check_store<dynamic_depth>(OneOfEach{}, layers, one_of_each, 5);
    check_store<2>(OffloadAll{}, layers, [](auto, auto) { return offload; });
  }
}

TEST_CASE("an evaluation makes no traffic, at any depth, before, between and after training passes") {
  const BundleLayout layout = layer_layout();
  const auto check = [&]<std::uint32_t Depth>(std::integral_constant<std::uint32_t, Depth>) {
    INFO("depth ", Depth);
    Bench bench;
    ActivationStore<LoggingDevice, OffloadAll, Depth> store{bench.hbm, bench.host, OffloadAll{},
                                                            9,         layout,     {.fill_evicted = true}};
    for (int round = 0; round < 2; ++round) {
      const TransferStats before = store.stats();
      const auto counts = bench.device.counts();
      run_forward(bench.device, bench.stream, store, layout, 1, 6, false);
      run_forward(bench.device, bench.stream, store, layout, 2, 3, false);
      CHECK(store.stats() == before);
      CHECK(bench.device.counts().h2d_bytes == counts.h2d_bytes);
      CHECK(bench.device.counts().d2h_bytes == counts.d2h_bytes);
      for (std::uint32_t l = 0; l < store.layers(); ++l)
        CHECK_THROWS_AS(static_cast<void>(store.restore(l, bench.stream)), InvalidArgument);
      run_forward(bench.device, bench.stream, store, layout, 3, 6);
      run_backward(bench.device, bench.stream, store, layout, 3, 6, [](auto, auto) { return false; });
      if (Depth < 9) CHECK(store.stats().h2d_bytes > before.h2d_bytes);
    }
  };
  check(std::integral_constant<std::uint32_t, 1>{});
  check(std::integral_constant<std::uint32_t, 2>{});
  check(std::integral_constant<std::uint32_t, 3>{});
  check(std::integral_constant<std::uint32_t, 4>{});
  check(std::integral_constant<std::uint32_t, 9>{});
}

TEST_CASE("two views of one buffer are stored once, however they are mixed with others") {
  Bench bench;
  const auto info = [](std::string name, std::uint64_t count, DType dtype = DType::fp32) {
    return TensorInfo{.name = std::move(name), .dtype = dtype, .count = count};
  };
  const BundleLayout layout{{{.info = info("small view", 64), .buffer = 1},
                             {.info = info("other", 128)},
                             {.info = info("buffer", 512), .buffer = 1},
                             {.info = info("as halves", 1024, DType::bf16), .buffer = 1},
                             {.info = info("second buffer", 64), .buffer = 2},
                             {.info = info("same name, no buffer", 64)},
                             {.info = info("same name, no buffer", 64)}},
                            2};
  ActivationStore store{bench.hbm, bench.host, OffloadAll{}, 2, layout};
  auto saved = store.save(0, bench.stream);
  const float* small = saved.tensor<float>(0).data();
  CHECK(saved.tensor<float>(2).data() == small);
  CHECK(saved.tensor<float>(2).count() == 512);
  CHECK(reinterpret_cast<const float*>(saved.tensor<bf16>(3).data()) == small);
  CHECK(saved.tensor<float>(0).count() == 64);
  CHECK(saved.tensor<float>(1).data() == small + 512);
  CHECK(saved.tensor<float>(4).data() == small + 640);
  CHECK(saved.tensor<float>(5).data() != saved.tensor<float>(6).data());
  for (std::uint32_t i = 0; i < 7; ++i) {
    if (i != 3) CHECK(reinterpret_cast<std::uintptr_t>(saved.tensor<float>(i).data()) % 256 == 0);
  }
  // 512 + 128 + 64 + 64 + 64 floats a layer.
  CHECK(bench.host.usage().by_role[static_cast<std::uint32_t>(Role::activation)] == Bytes{2 * 832 * 4});
}

TEST_CASE("a buffer with a view that is a checkpoint is not recomputed") {
  Bench bench;
  const BundleLayout layout{{{.info = {.name = "x", .count = 64}, .buffer = 3},
                             {.info = {.name = "y", .count = 64}, .checkpoint = true, .buffer = 3},
                             {.info = {.name = "z", .count = 64}}},
                            1};
  ActivationStore store{bench.hbm, bench.host, RecomputeMatching{{"*"}, OffloadAll{}}, 5, layout};
  for (std::uint32_t l = 0; l < 5; ++l) store.save(l, bench.stream).commit();
  for (std::uint32_t l = 5; l-- > 0;) {
    const auto saved = store.restore(l, bench.stream);
    CHECK(!saved.missing(0));
    CHECK(!saved.missing(1));
    CHECK(saved.missing(2) == (l < 2));
  }
  // A policy of the user's own that wants a checkpoint recomputed gets it where its home is.
  struct RecomputeAll {
    Tier tier;
    SaveMode save(const TensorInfo&) const { return SaveMode::recompute; }
    Tier home(const TensorInfo&) const { return tier; }
  };
  for (const Tier tier : {Tier::hbm, Tier::pinned_host}) {
    Bench other;
    const ActivationStore checkpoint{other.hbm, other.host, RecomputeAll{tier}, 5, layout};
    const Bytes held = other.host.usage().by_role[static_cast<std::uint32_t>(Role::activation)];
    CHECK(held == (tier == Tier::hbm ? Bytes{} : Bytes{5 * 256}));
  }
}

TEST_CASE("layers of different layouts") {
  Bench bench;
  std::vector<BundleLayout> layouts;
  for (std::uint64_t l = 0; l < 7; ++l) {
    BundleLayout layout;
    layout.rows = l + 1;
    for (std::uint64_t i = 0; i < l; ++i)  // the first layer saves nothing
      layout.tensors.push_back({.info = {.name = "t", .count = (l + 1) * (100 * i + 3)}});
    layouts.push_back(layout);
  }
  ActivationStore store{bench.hbm, bench.host, OffloadAll{}, layouts, {.fill_evicted = true}};
  std::uint64_t wrong = 0;
  for (std::uint64_t pass = 1; pass <= 3; ++pass) {
    for (std::uint32_t l = 0; l < 7; ++l) {
      auto saved = store.save(l, bench.stream);
      for (std::uint32_t i = 0; i < layouts[l].tensors.size(); ++i)
        enqueue_compute(bench.device, bench.stream, saved, layouts[l], pass, l, i);
      saved.commit();
    }
    for (std::uint32_t l = 7; l-- > 0;) {
      const auto saved = store.restore(l, bench.stream);
      for (std::uint32_t i = 0; i < layouts[l].tensors.size(); ++i)
        enqueue_verify(bench.device, bench.stream, saved, layouts[l], pass, l, i, &wrong);
    }
    bench.device.synchronize(bench.stream);
  }
  CHECK(wrong == 0);
}

TEST_CASE("every layer's rows may differ, and differ again in the next pass") {
  const BundleLayout layout = layer_layout();
  Bench bench;
  ActivationStore<LoggingDevice, OneOfEach, 2> store{bench.hbm, bench.host, OneOfEach{},
                                                     7,         layout,     {.fill_evicted = true}};
  std::uint64_t wrong = 0;
  for (std::uint64_t pass = 1; pass <= 4; ++pass) {
    for (std::uint32_t l = 0; l < 7; ++l) {
      auto saved = store.save(l, bench.stream, 1 + (l * 5 + pass) % 6);
      for (std::uint32_t i = 0; i < tensor_count; ++i) {
        if (i != hidden_view) enqueue_compute(bench.device, bench.stream, saved, layout, pass, l, i);
      }
      saved.commit();
    }
    for (std::uint32_t l = 7; l-- > 0;) {
      const auto saved = store.restore(l, bench.stream);
      CHECK(saved.rows() == 1 + (l * 5 + pass) % 6);
      CHECK(saved.tensor<float>(input).count() == saved.rows() * 10);
      if (saved.missing(mask)) enqueue_compute(bench.device, bench.stream, saved, layout, pass, l, mask);
      for (std::uint32_t i = 0; i < tensor_count; ++i)
        enqueue_verify(bench.device, bench.stream, saved, layout, pass, l, i, &wrong);
    }
    bench.device.synchronize(bench.stream);
  }
  CHECK(wrong == 0);
}

// The same with every policy: what was written against a resident store goes on with a paged one.
TEST_CASE_TEMPLATE("what cannot be meant is refused and leaves the store usable", Policy, OffloadAll, KeepResident) {
  const BundleLayout layout = layer_layout();
  Bench bench;
  ActivationStore store{bench.hbm, bench.host, Policy{}, 5, layout, {.fill_evicted = true}};
  const auto save = [&](std::uint32_t l) { store.save(l, bench.stream).commit(); };
  const auto refuses_save = [&](std::uint32_t l, std::uint64_t rows = 6) {
    CHECK_THROWS_AS(static_cast<void>(store.save(l, bench.stream, rows)), InvalidArgument);
  };
  const auto refuses_restore = [&](std::uint32_t l) {
    CHECK_THROWS_AS(static_cast<void>(store.restore(l, bench.stream)), InvalidArgument);
  };
  refuses_restore(0);  // nothing saved
  refuses_save(1);     // not the first
  refuses_save(5);     // no such layer
  refuses_restore(5);
  save(0);
  refuses_save(1, 7);  // more rows than the layout has
  refuses_save(1, 0);  // an empty batch has nothing to restore
  refuses_save(2);     // out of order
  refuses_restore(0);  // the forward has not ended
  save(1);
  refuses_save(1);
  save(2);
  save(3);
  {
    auto last = store.save(4, bench.stream);
    CHECK_THROWS_AS(static_cast<void>(last.template tensor<bf16>(input)), InvalidArgument);  // another type
    CHECK_THROWS_AS(static_cast<void>(last.template tensor<float>(tensor_count)), InvalidArgument);  // no such tensor
    last.commit();
  }
  refuses_restore(3);  // out of order
  {
    const auto restored = store.restore(4, bench.stream);
    refuses_restore(3 + 1);  // once only
  }
  refuses_save(4);
  {
    const auto restored = store.restore(3, bench.stream);
  }
  // A forward may start over at any point.
  run_forward(bench.device, bench.stream, store, layout, 9, 6);
  run_backward(bench.device, bench.stream, store, layout, 9, 6, [](auto, auto) { return false; });
  refuses_restore(0);

  // Either mark makes a checkpoint.
  const BundlePlacement marked{BundleLayout{{{.info = {.name = "a", .checkpoint = true, .count = 4}},
                                             {.info = {.name = "b", .count = 4}, .checkpoint = true},
                                             {.info = {.name = "c", .count = 4}}},
                                            2},
                               RecomputeFirstLayers{4}, 0, 8};
  CHECK(marked.mode(0) != SaveMode::recompute);
  CHECK(marked.mode(1) != SaveMode::recompute);
  CHECK(marked.mode(2) == SaveMode::recompute);

  CHECK_THROWS_AS((BundlePlacement{BundleLayout{{}, 0}, OffloadAll{}, 0, 1}), InvalidArgument);
  CHECK_THROWS_AS((BundlePlacement{BundleLayout{{{.info = {.name = "odd", .count = 7}}}, 2}, OffloadAll{}, 0, 1}),
                  InvalidArgument);
}

TEST_CASE("too many layers held at once is an error that names the holders, not a hang") {
  const Watchdog watchdog{"held layers"};
  const BundleLayout layout = layer_layout();
  Bench bench;
  ActivationStore<LoggingDevice, OffloadAll, 2> store{bench.hbm, bench.host, OffloadAll{}, 5, layout};
  auto zero = store.save(0, bench.stream), one = store.save(1, bench.stream);
  const auto error = thrown_by<SlotsExhausted>([&] { static_cast<void>(store.save(2, bench.stream)); });
  REQUIRE(error);
  CHECK(std::string{error->what()}.find("activations of layer 1") != std::string::npos);
  zero.commit();
  auto two = store.save(2, bench.stream);
  two.commit();
  one.commit();
  store.save(3, bench.stream).commit();
  store.save(4, bench.stream).commit();
  for (std::uint32_t l = 5; l-- > 0;) static_cast<void>(store.restore(l, bench.stream));
}

TEST_CASE("a bundle moves, and says when it is empty") {
  const BundleLayout layout = layer_layout();
  Bench bench;
  ActivationStore store{bench.hbm, bench.host, OneOfEach{}, 2, layout, {.fill_evicted = true}};
  {
    auto saved = store.save(0, bench.stream);
    auto moved = std::move(saved);
    CHECK_THROWS_AS(static_cast<void>(saved.tensor<float>(hidden)), InvalidArgument);
    CHECK_THROWS_AS(saved.commit(), InvalidArgument);
    saved = std::move(moved);
    for (std::uint32_t i = 0; i < tensor_count; ++i)
      enqueue_compute(bench.device, bench.stream, saved, layout, 1, 0, i);
    const device_span<float> by_index = saved[hidden];  // typed by what it is assigned to
    CHECK(by_index == saved.tensor<float>(hidden));
    CHECK(saved.tensor<const float>(hidden).data() == by_index.data());
    CHECK(saved.tensor<float>(empty).empty());
    saved.commit();
    CHECK_THROWS_AS(saved.commit(), InvalidArgument);  // ended
    CHECK_THROWS_AS(static_cast<void>(saved.tensor<float>(hidden)), InvalidArgument);
  }
  store.save(1, bench.stream).commit();
  std::uint64_t wrong = 0;
  {
    auto last = store.restore(1, bench.stream);
    auto first = store.restore(0, bench.stream);
    last = std::move(first);  // ends what it held
    for (std::uint32_t i = 0; i < tensor_count; ++i)
      enqueue_verify(bench.device, bench.stream, last, layout, 1, 0, i, &wrong);
    last.commit();
    CHECK_THROWS_AS(last.commit(), InvalidArgument);
  }
  bench.device.synchronize(bench.stream);
  CHECK(wrong == 0);
  CHECK_THROWS_AS(static_cast<void>(store.restore(0, bench.stream)), InvalidArgument);  // commits did not save anew
}

TEST_CASE("a backward on another stream, and bundles used on two streams, are ordered") {
  const Watchdog watchdog{"two streams"};
  const BundleLayout layout = layer_layout();
  for (const std::uint64_t seed : {1u, 2u, 3u}) {
    Bench bench;
    const LoggingDevice::Stream backward = bench.device.create_stream("backward"),
                                side = bench.device.create_stream("side");
    const LoggingDevice::Event turn = bench.device.create_event(), back = bench.device.create_event();
    ActivationStore<LoggingDevice, OneOfEach, 2> store{bench.hbm, bench.host, OneOfEach{},
                                                       7,         layout,     {.fill_evicted = true}};
    bench.device.delay_at_random(seed, std::chrono::microseconds{200});
    std::uint64_t wrong = 0, wrong_side = 0;
    for (std::uint64_t pass = 1; pass <= 3; ++pass) {
      for (std::uint32_t l = 0; l < 7; ++l) {
        auto saved = store.save(l, bench.stream);
        saved.used_on(side);
        saved.used_on(side);  // once is enough
        for (std::uint32_t i = 0; i < tensor_count; ++i) {
          const LoggingDevice::StreamRef on =
              i % 2 == 0 ? LoggingDevice::StreamRef{bench.stream} : LoggingDevice::StreamRef{side};
          if (i != hidden_view) enqueue_compute(bench.device, on, saved, layout, pass, l, i);
        }
        saved.commit();
      }
      // No event between the two streams but what the store makes.
      for (std::uint32_t l = 7; l-- > 0;) {
        auto saved = store.restore(l, backward);
        saved.used_on(side);
        if (saved.missing(mask)) enqueue_compute(bench.device, backward, saved, layout, pass, l, mask);
        for (std::uint32_t i = 0; i < tensor_count; ++i) {
          const bool aside = i % 2 == 0 && i != hidden_view;
          enqueue_verify(bench.device, aside ? LoggingDevice::StreamRef{side} : LoggingDevice::StreamRef{backward},
                         saved, layout, pass, l, i, aside ? &wrong_side : &wrong);
        }
      }
    }
    bench.device.synchronize(backward);
    bench.device.synchronize(side);
    bench.device.synchronize(bench.stream);
    CHECK(wrong == 0);
    CHECK(wrong_side == 0);
  }
}

TEST_CASE("the calling thread waits for nothing: whole passes in flight behind a held stream") {
  const Watchdog watchdog{"held stream"};
  const BundleLayout layout = layer_layout();
  Bench bench{4_MiB, {.ring_capacity = 1 << 14}};
  ActivationStore store{bench.hbm, bench.host, OneOfEach{}, 9, layout, {.fill_evicted = true}};
  Gate gate;
  bench.device.enqueue(bench.stream, gate.pass());
  std::uint64_t wrong = 0;
  for (std::uint64_t pass = 1; pass <= 4; ++pass) {
    run_forward(bench.device, bench.stream, store, layout, pass, 6);
    for (std::uint32_t l = 9; l-- > 0;) {
      const auto saved = store.restore(l, bench.stream);
      if (saved.missing(mask)) enqueue_compute(bench.device, bench.stream, saved, layout, pass, l, mask);
      for (std::uint32_t i = 0; i < tensor_count; ++i)
        enqueue_verify(bench.device, bench.stream, saved, layout, pass, l, i, &wrong);
    }
  }
  CHECK(bench.device.stats().ring_full_waits == 0);
  gate.open();
  bench.device.synchronize(bench.stream);
  CHECK(wrong == 0);
}

TEST_CASE("no host code of the store touches device memory") {
  const Watchdog watchdog{"protected memory"};
  const BundleLayout layout = layer_layout(2);
  Bench bench{256_KiB, {.debug_protection = true}};
  ActivationStore<LoggingDevice, OneOfEach, 2> store{bench.hbm, bench.host, OneOfEach{},
                                                     5,         layout,     {.fill_evicted = true}};
  for (std::uint64_t pass = 1; pass <= 2; ++pass) {
    run_forward(bench.device, bench.stream, store, layout, pass, 2);
    run_backward(bench.device, bench.stream, store, layout, pass, 2, [](auto l, auto i) { return i == mask && l < 3; });
  }
}

TEST_CASE("HBM held is the slots and what is kept, whatever the number of layers") {
  const BundleLayout layout = layer_layout();
  const auto held = [&]<std::uint32_t Depth, class Policy>(std::integral_constant<std::uint32_t, Depth>, Policy policy,
                                                           std::uint32_t layers) {
    Bench bench;
    ActivationStore<LoggingDevice, Policy, Depth> store{bench.hbm, bench.host, policy, layers, layout};
    const Bytes before = bench.hbm.usage().used;
    for (std::uint64_t pass = 1; pass <= 2; ++pass) {
      run_forward(bench.device, bench.stream, store, layout, pass, 6);
      for (std::uint32_t l = layers; l-- > 0;) static_cast<void>(store.restore(l, bench.stream));
    }
    CHECK(bench.hbm.usage().used == before);
    CHECK(bench.hbm.usage().high_water == before);
    CHECK(bench.hbm.usage().by_role[static_cast<std::uint32_t>(Role::activation)] == before);
    return before.count();
  };
  const std::uint64_t slot =
      HbmArena<LoggingDevice>::footprint(Bytes{padded_bytes({input, hidden, mask, statistics}, 6)}).count();
  constexpr std::integral_constant<std::uint32_t, 2> two;
  constexpr std::integral_constant<std::uint32_t, 3> three;
  for (const std::uint32_t layers : {7u, 14u, 28u}) {
    CHECK(held(three, OffloadAll{}, layers) == 3 * slot);
    CHECK(held(two, OffloadAll{}, layers) == 2 * slot);
    CHECK(held(three, KeepLastLayers{2}, layers) == (3 + 2) * slot);
    CHECK(held(three, RecomputeFirstLayers{4, OffloadAll{}}, layers) == 3 * slot);
    CHECK(held(three, KeepResident{}, layers) == layers * slot);
  }
}

TEST_CASE("an empty store, and one that has nothing to save") {
  Bench bench;
  ActivationStore none{bench.hbm, bench.host, OffloadAll{}, 0, layer_layout()};
  CHECK(none.layers() == 0);
  CHECK_THROWS_AS(static_cast<void>(none.save(0, bench.stream)), InvalidArgument);
  ActivationStore nothing{bench.hbm, bench.host, OffloadAll{}, 3, BundleLayout{{{.info = {.name = "e"}}}, 4}};
  for (std::uint32_t l = 0; l < 3; ++l) nothing.save(l, bench.stream, 2).commit();
  for (std::uint32_t l = 3; l-- > 0;) CHECK(nothing.restore(l, bench.stream).tensor<float>(0).empty());
  CHECK(nothing.stats() == TransferStats{});
  CHECK(bench.hbm.usage().used == Bytes{});
}

TEST_CASE("a store that does not fit throws and gives everything back") {
  Bench bench{64_KiB};
  const BundleLayout layout{{{.info = {.name = "x", .count = 4096}}}, 1};
  using Store = ActivationStore<LoggingDevice, OffloadAll, 3>;
  const auto refused_by = [&](std::uint32_t layers, const BundleLayout& of_a_layer) {
    const auto error = thrown_by<OutOfMemory>([&] { Store{bench.hbm, bench.host, OffloadAll{}, layers, of_a_layer}; });
    REQUIRE(error);
    return error->details().tier;
  };
  CHECK(refused_by(5, layout) == Tier::pinned_host);  // 5 x 16 KiB
  const BundleLayout wide{{{.info = {.name = "x", .count = 6000}}}, 1};
  CHECK(refused_by(2, wide) == Tier::hbm);  // 3 x 24 KB
  CHECK(bench.hbm.try_allocate(64_KiB, "all", Role::other, bench.stream).has_value());
  CHECK(bench.host.try_allocate(64_KiB, "all", Role::other, bench.stream).has_value());
}

TEST_CASE("a refused save changes nothing, and a new forward leaves nothing of the old one") {
  HostDevice device;
  HbmArena hbm{device, 1_MiB};
  PinnedHostArena host{device, 1_MiB};
  const HostDevice::Stream stream = device.create_stream();
  const BundleLayout layout{.tensors = {{{.name = "x", .count = 512}}}, .rows = 8};
  ActivationStore store{hbm, host, OffloadAll{}, 10, layout, {.fill_evicted = true}};
  const auto forward = [&] {
    for (std::uint32_t l = 0; l < 10; ++l) {
      auto saved = store.save(l, stream);
      device.enqueue(stream, [x = saved.tensor<float>(0), l] {
        for (std::uint64_t i = 0; i < x.count(); ++i) x.data()[i] = static_cast<float>(l);
      });
      saved.commit();
    }
  };
  forward();
  CHECK_THROWS_AS((void)store.save(2, stream, 2), InvalidArgument);
  std::uint64_t wrong = 0;
  for (std::uint32_t l = 10; l-- > 0;) {
    auto saved = store.restore(l, stream);
    CHECK(saved.rows() == 8);
    CHECK(saved.tensor<float>(0).count() == 512);
    device.enqueue(stream, [x = saved.tensor<float>(0), l, &wrong] {
      for (std::uint64_t i = 0; i < x.count(); ++i) wrong += !(x.data()[i] == static_cast<float>(l));
    });
  }
  device.synchronize(HostDevice::StreamRef{stream});
  CHECK(wrong == 0);

  ActivationStore kept{hbm, host, KeepResident{}, 3, layout};
  for (std::uint32_t l = 0; l < 3; ++l) kept.save(l, stream).commit();
  kept.save(0, stream).commit();
  CHECK_THROWS_AS((void)kept.restore(2, stream), InvalidArgument);
  device.synchronize(HostDevice::StreamRef{stream});
}

TEST_CASE("scratch makes no call on the copy streams: an observed step can be collected behind the user's stream") {
  HostDevice device;
  HbmArena hbm{device, 1_MiB};
  PinnedHostArena host{device, 1_MiB};
  const HostDevice::Stream stream = device.create_stream();
  Recorder<HostDevice> recorder{device, 64, stream};
  const BundleLayout layout{.tensors = {{{.name = "x", .count = 64}}}};
  ActivationStore<HostDevice, RecomputeFirstLayers<>, 2, Recorder<HostDevice>::Observer> store{
      hbm, host, RecomputeFirstLayers{8}, 8, layout, {}, recorder.observer()};
  for (std::uint32_t l = 0; l < 8; ++l) store.save(l, stream).commit();
  for (std::uint32_t l = 8; l-- > 0;) (void)store.restore(l, stream);
  device.synchronize(HostDevice::StreamRef{stream});
  std::uint64_t stalls = 0;
  recorder.collect([&](const auto& interval) {
    CHECK(interval.activity == Activity::stall);
    ++stalls;
  });
  CHECK(stalls == 2 * 8);  // one a lease
  CHECK(recorder.dropped() == 0);
  CHECK(store.stats().h2d_bytes + store.stats().d2h_bytes + store.stats().fills + store.stats().write_backs == 0);
}
