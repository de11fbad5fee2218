#include "daemon/look_board.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "base/rng.h"
#include "daemon/test_files.h"

namespace forebay {
namespace {

using Turn = LookBoard::Turn;
using testing::Seeds;
constexpr LookBoard::ClientId kClient = 100;  // of rank 0; the others follow

LookBoard::Question Of(uint32_t rank, uint64_t opening = 1) {
  return {.client = kClient + rank,
          .job = "job",
          .name = "data",
          .rank = rank,
          .ranks = 4,
          .opening = opening,
          .waited_for = 0,
          .wrote_at = LookBoard::Question::kNever};
}

LookBoard::Seen SeenOf(uint64_t bytes = 16) {
  return {.memory = OwnedFd(), .list = 1, .files = bytes / 16, .bytes = bytes, .charge = nullptr};
}

// The rank looks and hands it in.
void LookAs(LookBoard& board, uint32_t rank, Nanos now, uint64_t opening = 1) {
  const LookBoard::Answer answer = board.Ask(Of(rank, opening), now);
  ASSERT_EQ(answer.turn, Turn::kLook);
  ASSERT_TRUE(board.HandIn(kClient + rank, answer.ticket, SeenOf(), now + 1));
}

TEST(LookBoard, OneLooksForAll) {
  LookBoard board;
  const LookBoard::Answer first = board.Ask(Of(0), 10);
  ASSERT_EQ(first.turn, Turn::kLook);
  LookBoard::Question waiting = Of(1);
  const LookBoard::Answer wait = board.Ask(waiting, 20);
  ASSERT_EQ(wait.turn, Turn::kWait);
  waiting.waited_for = wait.ticket;
  EXPECT_EQ(board.Ask(waiting, 30).turn, Turn::kWait);
  EXPECT_FALSE(board.HandIn(kClient + 1, first.ticket, SeenOf(), 40)) << "it is another's";
  ASSERT_TRUE(board.HandIn(kClient, first.ticket, SeenOf(32), 40));
  EXPECT_EQ(board.bytes(), 32u);
  const LookBoard::Answer taken = board.Ask(waiting, 50);
  ASSERT_EQ(taken.turn, Turn::kTake);
  EXPECT_EQ(taken.seen->files, 2u);
  EXPECT_EQ(board.Ask(Of(2), 60).turn, Turn::kTake) << "who comes soon after takes it, too";
  EXPECT_EQ(board.looks(), 1u);
  EXPECT_EQ(board.Ask(Of(3), 70).turn, Turn::kTake);
  EXPECT_EQ(board.looks(), 0u) << "all four have it";
  EXPECT_EQ(board.bytes(), 0u);
  EXPECT_EQ(board.askers(), 0u);
  EXPECT_EQ(taken.seen->files, 2u) << "who has it keeps it";
}

TEST(LookBoard, ARankThatComesAgainGetsANewLook) {
  LookBoard board;
  LookAs(board, 0, 10);
  EXPECT_EQ(board.Ask(Of(1), 20).turn, Turn::kTake);
  // Its program was started anew: to that one this is the first opening.
  const LookBoard::Answer again = board.Ask(Of(1), 30);
  ASSERT_EQ(again.turn, Turn::kLook);
  ASSERT_TRUE(board.HandIn(kClient + 1, again.ticket, SeenOf(), 40));
  EXPECT_EQ(board.Ask(Of(0), 50).turn, Turn::kTake) << "made since it looked itself";
  EXPECT_EQ(board.Ask(Of(0), 60).turn, Turn::kLook);
}

TEST(LookBoard, NothingThatBeganBeforeTheOpeningBeforeIsTaken) {
  LookBoard board;
  LookAs(board, 0, 10, 1);
  LookAs(board, 0, 20, 2);
  EXPECT_EQ(board.Ask(Of(1, 1), 30).turn, Turn::kTake);
  // What was written between its openings, rank 0 had not seen at 20.
  const LookBoard::Answer second = board.Ask(Of(1, 2), 40);
  ASSERT_EQ(second.turn, Turn::kLook);
  EXPECT_EQ(board.Ask(Of(2, 2), 50).turn, Turn::kWait);
  // The same while somebody looks: others may wait for that one.
  EXPECT_EQ(board.Ask(Of(3, 2), 60).turn, Turn::kWait);
  EXPECT_EQ(board.Ask(Of(3, 2), 70).turn, Turn::kAlone);
  ASSERT_TRUE(board.HandIn(kClient + 1, second.ticket, SeenOf(), 80));
  EXPECT_EQ(board.Ask(Of(2, 2), 90).turn, Turn::kLook) << "rank 2 asked at 50, too";
}

TEST(LookBoard, OpeningsJobsAndDataSetsAreApart) {
  LookBoard board;
  LookAs(board, 0, 10);
  EXPECT_EQ(board.Ask(Of(1, 2), 20).turn, Turn::kLook);
  LookBoard::Question other = Of(2);
  other.job = "another";
  EXPECT_EQ(board.Ask(other, 30).turn, Turn::kLook);
  other = Of(3);
  other.name = "data2";
  EXPECT_EQ(board.Ask(other, 40).turn, Turn::kLook);
}

TEST(LookBoard, ALookerThatGoesIsReplaced) {
  LookBoard board;
  const LookBoard::Answer first = board.Ask(Of(0), 10);
  LookBoard::Question waiting = Of(1);
  waiting.waited_for = board.Ask(waiting, 20).ticket;
  LookBoard::Question third = Of(2);
  third.waited_for = board.Ask(third, 21).ticket;
  board.Gone(kClient);
  EXPECT_EQ(board.looks(), 0u);
  const LookBoard::Answer next = board.Ask(waiting, 30);
  ASSERT_EQ(next.turn, Turn::kLook);
  EXPECT_NE(next.ticket, first.ticket);
  EXPECT_EQ(board.Ask(third, 31).turn, Turn::kWait);
  EXPECT_FALSE(board.HandIn(kClient, first.ticket, SeenOf(), 32));
  ASSERT_TRUE(board.HandIn(kClient + 1, next.ticket, SeenOf(), 33));
  EXPECT_EQ(board.Ask(third, 34).turn, Turn::kTake);
}

TEST(LookBoard, NobodyWaitsForOneThatStandsStill) {
  const LookBoardLimits limits;
  LookBoard board;
  const LookBoard::Answer first = board.Ask(Of(0), 1);
  LookBoard::Question waiting = Of(1);
  waiting.waited_for = board.Ask(waiting, 2).ticket;
  board.Progress(kClient, first.ticket, limits.still);
  EXPECT_EQ(board.Ask(waiting, 2 * limits.still).turn, Turn::kWait);
  EXPECT_EQ(board.Ask(waiting, 2 * limits.still + 1).turn, Turn::kAlone);
  EXPECT_EQ(board.Ask(Of(2), 2 * limits.still + 2).turn, Turn::kAlone);
  // It moves again, and is of use to who comes later.
  ASSERT_TRUE(board.HandIn(kClient, first.ticket, SeenOf(), 2 * limits.still + 3));
  EXPECT_EQ(board.Ask(Of(3), 2 * limits.still + 4).turn, Turn::kTake);

  // Nor for one that takes for ever, however it moves.
  const Nanos start = 3 * limits.still;
  const LookBoard::Answer slow = board.Ask(Of(0, 2), start);
  LookBoard::Question patient = Of(1, 2);
  patient.waited_for = board.Ask(patient, start + 1).ticket;
  board.Progress(kClient, slow.ticket, start + limits.longest);
  EXPECT_EQ(board.Ask(patient, start + limits.longest).turn, Turn::kWait);
  EXPECT_EQ(board.Ask(patient, start + limits.longest + 1).turn, Turn::kAlone);
}

TEST(LookBoard, WhatCameToNothingHoldsNobody) {
  const LookBoardLimits limits;
  LookBoard board;
  const LookBoard::Answer first = board.Ask(Of(0), 10);
  LookBoard::Question waiting = Of(1);
  waiting.waited_for = board.Ask(waiting, 20).ticket;
  board.Drop(kClient + 1, first.ticket, 25);
  EXPECT_EQ(board.Ask(waiting, 26).turn, Turn::kWait) << "it was another's to drop";
  board.Drop(kClient, first.ticket, 30);
  EXPECT_EQ(board.Ask(waiting, 40).turn, Turn::kAlone);
  EXPECT_EQ(board.Ask(Of(2), 50).turn, Turn::kAlone) << "not one after the other";
  EXPECT_EQ(board.Ask(Of(2), 30 + limits.offered).turn, Turn::kLook);
}

TEST(LookBoard, OffersWhatIsNotOld) {
  const LookBoardLimits limits;
  LookBoard board;
  EXPECT_EQ(board.NextExpiry(), LookBoard::kNothing);
  LookAs(board, 0, 9);
  EXPECT_EQ(board.NextExpiry(), 10 + limits.offered);
  board.Expire(9 + limits.offered);
  EXPECT_EQ(board.Ask(Of(1), 9 + limits.offered).turn, Turn::kTake);
  EXPECT_EQ(board.Ask(Of(2), 10 + limits.offered).turn, Turn::kLook);
  EXPECT_EQ(board.bytes(), 0u);
}

TEST(LookBoard, GoesWithTheJobsLastClient) {
  LookBoard board;
  LookAs(board, 0, 10);
  EXPECT_EQ(board.Ask(Of(1), 20).turn, Turn::kTake);
  board.Gone(kClient);
  EXPECT_EQ(board.looks(), 1u) << "rank 1 is there";
  board.Gone(kClient + 1);
  EXPECT_EQ(board.looks(), 0u);
  EXPECT_EQ(board.bytes(), 0u);
  EXPECT_EQ(board.Ask(Of(2), 30).turn, Turn::kLook) << "of a program that follows";
}

TEST(LookBoard, WhatTheJobWroteIsSeen) {
  LookBoard board;
  LookAs(board, 0, 10);
  LookBoard::Question wrote = Of(1);
  wrote.wrote_at = 5;
  EXPECT_EQ(board.Ask(wrote, 20).turn, Turn::kTake) << "before anybody looked";
  wrote = Of(2);
  wrote.wrote_at = 25;
  const LookBoard::Answer own = board.Ask(wrote, 30);
  ASSERT_EQ(own.turn, Turn::kLook);
  EXPECT_EQ(board.Ask(Of(3), 40).turn, Turn::kWait) << "the first look is not offered any more";
  // Another rank writes while that one looks.
  wrote = Of(3);
  wrote.wrote_at = 45;
  EXPECT_EQ(board.Ask(wrote, 50).turn, Turn::kLook);
  EXPECT_FALSE(board.HandIn(kClient + 2, own.ticket, SeenOf(), 60));
}

TEST(LookBoard, AWriteIsTold) {
  LookBoard board;
  LookAs(board, 0, 10);
  EXPECT_EQ(board.Ask(Of(1), 20).turn, Turn::kTake);
  LookBoard::Question other = Of(2);
  other.job = "another";
  const LookBoard::Answer beside = board.Ask(other, 25);
  board.Wrote(kClient + 1);
  const LookBoard::Answer next = board.Ask(Of(3), 30);
  ASSERT_EQ(next.turn, Turn::kLook) << "what rank 0 saw is over";
  board.Wrote(kClient + 3);
  EXPECT_FALSE(board.HandIn(kClient + 3, next.ticket, SeenOf(), 40));
  // There was no look of the job for a while, and no question of this client since.
  EXPECT_EQ(board.Ask(Of(0, 2), 45).turn, Turn::kLook);
  board.Wrote(kClient + 1);
  EXPECT_EQ(board.Ask(Of(3, 2), 46).turn, Turn::kLook);
  EXPECT_TRUE(board.HandIn(kClient + 2, beside.ticket, SeenOf(), 50)) << "of another job";
}

TEST(LookBoard, IsBounded) {
  LookBoardLimits limits;
  limits.looks = 20;
  limits.looks_of_client = 15;
  limits.ranks = 100;
  limits.jobs = 1;
  limits.bytes = 1000;
  LookBoard board(limits);
  std::vector<LookBoard::Ticket> tickets;
  for (uint64_t opening = 1; opening <= 15; ++opening) {
    const LookBoard::Answer answer = board.Ask(Of(0, opening), 10);
    ASSERT_EQ(answer.turn, Turn::kLook);
    tickets.push_back(answer.ticket);
  }
  EXPECT_EQ(board.Ask(Of(0, 16), 10).turn, Turn::kAlone);
  for (uint64_t opening = 16; opening <= 20; ++opening) {
    EXPECT_EQ(board.Ask(Of(1, opening), 10).turn, Turn::kLook);
  }
  EXPECT_EQ(board.Ask(Of(1, 21), 10).turn, Turn::kAlone);
  EXPECT_EQ(board.looks(), 20u);
  EXPECT_EQ(board.Ask(Of(100, 1), 10).turn, Turn::kAlone);
  LookBoard::Question other = Of(2);
  other.job = "another";
  EXPECT_EQ(board.Ask(other, 10).turn, Turn::kAlone);
  EXPECT_TRUE(board.HandIn(kClient, tickets[0], SeenOf(600), 20));
  EXPECT_FALSE(board.HandIn(kClient, tickets[1], SeenOf(401), 20));
  EXPECT_TRUE(board.HandIn(kClient, tickets[2], SeenOf(400), 20));
  EXPECT_EQ(board.bytes(), 1000u);
  EXPECT_FALSE(board.HandIn(kClient, tickets[3], SeenOf(~uint64_t{0}), 20));
  for (uint32_t rank = 0; rank < 2; ++rank) board.Gone(kClient + rank);
  board.Expire(20 + limits.offered);
  EXPECT_EQ(board.looks(), 0u);
  EXPECT_EQ(board.bytes(), 0u);
  EXPECT_EQ(board.askers(), 0u);
}

// Ranks that ask, wait, look, write, die and come again in any order, beside what must hold.
class Chaos {
 public:
  explicit Chaos(uint64_t seed) : random_(seed), board_(Limits()) {
    for (uint32_t rank = 0; rank < kRanks; ++rank) clients_[rank] = next_client_++;
  }

  void Step() {
    now_ += static_cast<Nanos>(1 + Below(Below(20) == 0 ? 40 : 4));
    const auto rank = static_cast<uint32_t>(Below(kRanks));
    switch (Below(12)) {
      case 0:
        Die(rank);
        break;
      case 1:
        wrote_[rank] = now_;
        break;
      case 2:
        if (looking_[rank]) board_.Drop(clients_[rank], looking_[rank]->ticket, now_);
        looking_[rank].reset();
        break;
      case 3:
      case 4:
        Finish(rank);
        break;
      case 5:
        if (looking_[rank]) board_.Progress(clients_[rank], looking_[rank]->ticket, now_);
        break;
      default:
        Ask(rank);
    }
    EXPECT_LE(board_.looks(), Limits().looks);
    EXPECT_LE(board_.bytes(), Limits().bytes);
  }

  uint64_t taken = 0;
  uint64_t waited = 0;

 private:
  static constexpr uint32_t kRanks = 4;
  struct Looking {
    LookBoard::Ticket ticket = 0;
    Nanos began = 0;
    uint64_t opening = 0;
  };
  struct Made {
    Looking look;
    Nanos handed_in = 0;
    std::set<uint32_t> ranks;
  };
  struct Waiting {
    LookBoard::Ticket ticket = 0;
    uint64_t opening = 0;
    Nanos since = 0;
  };

  static LookBoardLimits Limits() {
    LookBoardLimits limits;
    limits.offered = 60;
    limits.still = 25;
    limits.longest = 80;
    limits.looks = 6;
    limits.bytes = 64;
    return limits;
  }
  uint64_t Below(uint64_t end) { return random_.Next() % end; }

  void Die(uint32_t rank) {
    board_.Gone(clients_[rank]);
    clients_[rank] = next_client_++;
    looking_[rank].reset();
    waiting_[rank].reset();
    openings_[rank] = 0;
    wrote_[rank] = LookBoard::Question::kNever;
  }

  void Finish(uint32_t rank) {
    if (!looking_[rank]) return;
    const Looking look = *std::exchange(looking_[rank], std::nullopt);
    LookBoard::Seen seen = SeenOf();
    seen.list = look.ticket;
    if (board_.HandIn(clients_[rank], look.ticket, std::move(seen), now_)) {
      made_[look.ticket] = {look, now_, {rank}};
    }
  }

  void Ask(uint32_t rank) {
    if (looking_[rank]) return;
    const bool first = !waiting_[rank];
    if (first) {
      waiting_[rank] = Waiting{0, ++openings_[rank], now_};
      before_[rank] = std::exchange(last_[rank], now_);
    }
    LookBoard::Question question = Of(rank, waiting_[rank]->opening);
    question.client = clients_[rank];
    question.waited_for = waiting_[rank]->ticket;
    question.wrote_at = wrote_[rank];
    const LookBoard::Answer answer = board_.Ask(question, now_);
    if (answer.turn == Turn::kWait) {
      ++waited;
      waiting_[rank]->ticket = answer.ticket;
      const auto looker = std::find_if(looking_.begin(), looking_.end(), [&](const auto& entry) {
        return entry.second && entry.second->ticket == answer.ticket;
      });
      ASSERT_NE(looker, looking_.end()) << "nobody makes this look";
      EXPECT_NE(looker->first, rank);
      EXPECT_LE(now_ - looker->second->began, Limits().longest);
      return;
    }
    if (answer.turn == Turn::kLook) {
      looking_[rank] = Looking{answer.ticket, now_, waiting_[rank]->opening};
    }
    if (answer.turn == Turn::kTake) {
      ++taken;
      Made& made = made_.at(answer.seen->list);
      EXPECT_EQ(made.look.opening, waiting_[rank]->opening);
      EXPECT_GT(made.look.began, before_[rank]) << "older than this rank's opening before";
      EXPECT_GT(made.look.began, wrote_[rank]) << "the rank has written since";
      EXPECT_LT(now_ - made.handed_in, Limits().offered);
      EXPECT_TRUE(made.ranks.insert(rank).second) << "a look is taken once";
    }
    waiting_[rank].reset();
  }

  SplitMix64 random_;
  LookBoard board_;
  Nanos now_ = 1;
  LookBoard::ClientId next_client_ = 1;
  std::map<uint32_t, LookBoard::ClientId> clients_;
  std::map<uint32_t, std::optional<Looking>> looking_;
  std::map<uint32_t, std::optional<Waiting>> waiting_;
  std::map<uint32_t, uint64_t> openings_;
  std::map<uint32_t, Nanos> last_;
  std::map<uint32_t, Nanos> before_;
  std::map<uint32_t, Nanos> wrote_ = {{0, -1}, {1, -1}, {2, -1}, {3, -1}};
  std::map<LookBoard::Ticket, Made> made_;
};

TEST(LookBoard, AnyOrderOfEvents) {
  uint64_t taken = 0;
  uint64_t waited = 0;
  for (uint64_t seed = 0; seed < Seeds(); ++seed) {
    SCOPED_TRACE(seed);
    Chaos chaos(seed);
    for (int i = 0; i < 3000 && !::testing::Test::HasFailure(); ++i) chaos.Step();
    taken += chaos.taken;
    waited += chaos.waited;
  }
  EXPECT_GT(taken, 0u);
  EXPECT_GT(waited, 0u);
}

}  // namespace
}  // namespace forebay
