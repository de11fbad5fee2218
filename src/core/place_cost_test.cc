#include "core/place_cost.h"

#include <gtest/gtest.h>

#include <map>
#include <utility>

#include "core/storage_model.h"

namespace forebay {
namespace {

constexpr uint64_t kBytes = 100'000;

// Reads of samples that both places have, so many at a time, on a virtual clock.
class TwoPlaces {
 public:
  TwoPlaces(const StorageSettings& folder, const StorageSettings& source)
      : places_{Place(folder), Place(source)} {}

  void Change(const StorageSettings& folder) { places_[0].storage.Apply(folder, now_); }

  // Counts those that the folder got.
  size_t Read(size_t reads, size_t at_once, SourceExtra extra, bool late = true) {
    size_t from_folder = 0;
    for (size_t i = 0; i < reads; ++i) {
      while (flying_.size() >= at_once) End();
      PlaceCost folder = CostOf(places_[0]);
      for (const auto& [end, read] : flying_) {
        const double age = static_cast<double>(now_ - read.start);
        const Nanos tail = places_[0].model.Tail(kBytes, places_[0].depth);
        if (read.place == 0 && age > static_cast<double>(tail)) folder.stuck = age;
      }
      const bool source = choice_.PassBy(folder, places_[0].depth, CostOf(places_[1]),
                                         places_[1].depth, extra, late, now_);
      Begin(source ? 1 : 0);
      from_folder += source ? 0 : 1;
    }
    return from_folder;
  }
  // The models learn both places before anything is chosen.
  void Learn(size_t at_once) {
    for (int i = 0; i < 200; ++i) {
      while (flying_.size() >= at_once) End();
      Begin(i % 2);
    }
    while (!flying_.empty()) End();
  }
  Nanos now() const { return now_; }

 private:
  struct Place {
    explicit Place(const StorageSettings& settings) : storage(settings, 0) {}
    StorageModel storage;
    OriginModel model;
    size_t depth = 0;
    double last = 0;
  };
  struct UnderWay {
    size_t place = 0;
    size_t depth = 0;
    Nanos start = 0;
  };
  static PlaceCost CostOf(const Place& place) {
    PlaceCost cost = PlaceCost::Of(place.model, kBytes);
    cost.last = place.last;
    return cost;
  }
  void Begin(size_t at) {
    Place& place = places_[at];
    const Nanos end = place.storage.Admit(OpKind::kRead, kBytes, now_).finish_at;
    flying_.emplace(end, UnderWay{at, ++place.depth, now_});
  }
  void End() {
    const auto [end, read] = *flying_.begin();
    flying_.erase(flying_.begin());
    now_ = end;
    Place& place = places_[read.place];
    --place.depth;
    place.last = static_cast<double>(end - read.start);
    place.model.OnRead(kBytes, read.depth, end - read.start);
  }

  Place places_[2];
  PlaceChoice choice_;
  std::multimap<Nanos, UnderWay> flying_;
  Nanos now_ = 0;
};

StorageSettings Storage(Nanos latency, double megabytes) {
  StorageSettings settings;
  settings.read = latency;
  settings.bytes_per_s = megabytes * 1e6;
  settings.jitter = 0.1;
  return settings;
}

TEST(PlaceChoice, PlacesWorkSideBySideWhereOneAloneIsTheBottleneck) {
  for (const double disk : {50.0, 100.0, 300.0}) {
    TwoPlaces places(Storage(kMilli, disk), Storage(2 * kMilli, 100));
    places.Learn(64);
    const Nanos begin = places.now();
    places.Read(6000, 64, SourceExtra::kOpen);
    const double seconds = static_cast<double>(places.now() - begin) / kSecond;
    const double rate = 6000 * kBytes / 1e6 / seconds;
    EXPECT_GT(rate, 0.9 * (disk + 100)) << disk << " MB/s and 100 MB/s";
  }
}

TEST(PlaceChoice, APlaceThatTurnsBadIsLeftAndTriedAgainCheaply) {
  const StorageSettings good = Storage(200'000, 1000);
  StorageSettings bad = good;
  bad.read = 200 * kMilli;
  for (const SourceExtra extra : {SourceExtra::kLate, SourceExtra::kOpen}) {
    TwoPlaces places(good, Storage(5 * kMilli, 300));
    places.Learn(8);
    EXPECT_GT(places.Read(2000, 8, extra), 1990u);
    places.Change(bad);
    EXPECT_LT(places.Read(2000, 8, extra), 50u) << "left within tens of reads, and hardly tried";
    places.Change(good);
    places.Read(4000, 8, extra);  // some seconds, in which it is tried
    EXPECT_GT(places.Read(1000, 8, extra), 900u) << "and used again";
    places.Change(bad);
    EXPECT_LT(places.Read(2000, 8, extra), 50u);
  }
}

TEST(PlaceChoice, TheSourceIsSparedUnlessTheFolderIsTooLate) {
  TwoPlaces places(Storage(20 * kMilli, 50), Storage(kMilli, 300));
  places.Learn(16);
  EXPECT_EQ(places.Read(500, 16, SourceExtra::kNever), 500u);
  EXPECT_EQ(places.Read(500, 16, SourceExtra::kLate, false), 500u) << "nobody waits";
  EXPECT_LT(places.Read(500, 16, SourceExtra::kLate, true), 300u);
}

TEST(PlaceChoice, WhereItIsSparedTheSourceMustSurelyBeTheFirst) {
  PlaceChoice choice;
  PlaceCost source = PlaceCost::Flat(100 * kMilli);
  source.late = 1.5;
  const PlaceCost folder = PlaceCost::Flat(140 * kMilli);
  EXPECT_TRUE(choice.PassBy(PlaceCost::Flat(180 * kMilli), 1, source, 0, SourceExtra::kLate, true,
                            kSecond));
  EXPECT_FALSE(choice.PassBy(folder, 1, source, 0, SourceExtra::kLate, true, kSecond));
  EXPECT_TRUE(choice.PassBy(folder, 1, source, 0, SourceExtra::kOpen, true, kSecond));
  EXPECT_FALSE(choice.PassBy(PlaceCost(), 1, source, 0, SourceExtra::kOpen, true, kSecond))
      << "nothing is known of the folder";
  EXPECT_TRUE(choice.PassBy(folder, 1, PlaceCost(), 0, SourceExtra::kOpen, true, kSecond))
      << "one read tells what the source takes";
  EXPECT_FALSE(choice.PassBy(folder, 1, PlaceCost(), 1, SourceExtra::kOpen, true, 9 * kSecond));
  EXPECT_FALSE(choice.PassBy(folder, 1, PlaceCost(), 0, SourceExtra::kLate, true, 9 * kSecond));
  const PlaceCost quick = PlaceCost::Flat(5 * kMilli);
  for (const PlaceCost& faster : {PlaceCost(), PlaceCost::Flat(kMilli)}) {
    EXPECT_FALSE(choice.PassBy(quick, 1, faster, 0, SourceExtra::kLate, true, 9 * kSecond))
        << "read-ahead hides it";
  }
}

TEST(PlaceChoice, CostsFollowTheReadsUnderWay) {
  PlaceCost cost;
  for (size_t i = 0; i < PlaceCost::kDepths; ++i) cost.at[i] = 100.0 * static_cast<double>(i + 1);
  EXPECT_EQ(cost.Expect(0), 100);
  EXPECT_EQ(cost.Expect(1), 100);
  EXPECT_EQ(cost.Expect(2), 200);
  EXPECT_EQ(cost.Expect(3), 250);
  EXPECT_EQ(cost.Expect(4), 300);
  EXPECT_EQ(cost.Expect(1 << 20), 1300);
  cost.stuck = 5000;
  EXPECT_EQ(cost.Expect(4), 5000);
}

}  // namespace
}  // namespace forebay
