#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <numeric>
#include <set>

#include "dovetail/base/error.h"
#include "dovetail/trainer/dataset.h"
#include "dovetail/trainer/sample_order.h"
#include "dovetail/trainer/sources.h"
#include "tests/trainer/temporary.h"

namespace dovetail::trainer {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(SampleOrder, EachEpochIsAPermutationAndEpochsDiffer) {
  for (const int64_t n : {1, 2, 3, 5, 64, 1000}) {
    const SampleOrder order(n, 42, true);
    std::vector<int64_t> first, second;
    for (int64_t i = 0; i < n; ++i) first.push_back(order.at(i));
    for (int64_t i = 0; i < n; ++i) second.push_back(order.at(n + i));
    if (n >= 64) {
      EXPECT_NE(first, second) << n;
    }
    for (auto* epoch : {&first, &second}) {
      std::sort(epoch->begin(), epoch->end());
      std::vector<int64_t> all(static_cast<size_t>(n));
      std::iota(all.begin(), all.end(), 0);
      EXPECT_EQ(*epoch, all) << n;
    }
  }
}

// Neighbours in the order are no neighbours in the data: the mean distance of a random permutation
// is n/3.
TEST(SampleOrder, ShufflesFar) {
  const int64_t n = 4096;
  for (const uint64_t seed : {1, 2, 3}) {
    const SampleOrder order(n, seed, true);
    double distance = 0;
    for (int64_t i = 1; i < n; ++i)
      distance += static_cast<double>(std::abs(order.at(i) - order.at(i - 1)));
    EXPECT_NEAR(distance / static_cast<double>(n - 1), n / 3.0, n * 0.02) << seed;
  }
  EXPECT_NE(SampleOrder(n, 1, true).at(0), SampleOrder(n, 2, true).at(0));
  EXPECT_EQ(SampleOrder(n, 1, false).at(n + 17), 17);
}

// The samples of a step, per rank and micro-batch, as a set.
std::multiset<int64_t> step_samples(const SampleOrder& order, const GlobalBatch& batch,
                                    int64_t ranks, int64_t micro_batches, int64_t samples) {
  std::multiset<int64_t> all;
  for (int64_t rank = 0; rank < ranks; ++rank)
    for (int64_t a = 0; a < micro_batches; ++a)
      for (int64_t s : samples_of(order, batch, {rank, ranks, micro_batches, samples}, a))
        all.insert(s);
  return all;
}

TEST(SampleOrder, AStepIsTheSameSetForEveryNumberOfRanks) {
  const SampleOrder order(37, 9, true);
  int64_t position = 0;
  for (int step = 0; step < 12; ++step) {
    const GlobalBatch batch = batch_at(order, position, 8, LastBatch::keep);
    const auto one = step_samples(order, batch, 1, 1, 8);
    EXPECT_EQ(step_samples(order, batch, 1, 4, 2), one);
    EXPECT_EQ(step_samples(order, batch, 2, 2, 2), one);
    EXPECT_EQ(step_samples(order, batch, 4, 1, 2), one);
    EXPECT_EQ(step_samples(order, batch, 8, 1, 1), one);
    position = batch.next;
  }
}

// N ranks with one micro-batch do what one rank does with N.
TEST(SampleOrder, MicroBatchesOfOneRankAreThoseOfManyRanks) {
  const SampleOrder order(100, 3, true);
  const GlobalBatch batch = batch_at(order, 16, 8, LastBatch::drop);
  for (int64_t a = 0; a < 4; ++a)
    EXPECT_EQ(samples_of(order, batch, {0, 1, 4, 2}, a), samples_of(order, batch, {a, 4, 1, 2}, 0));
}

// B24: five samples for two ranks.
TEST(SampleOrder, OddSampleIsDroppedOrRunsWithEmptySlots) {
  const SampleOrder order(5, 1, false);
  GlobalBatch batch = batch_at(order, 0, 2, LastBatch::drop);
  batch = batch_at(order, batch.next, 2, LastBatch::drop);
  EXPECT_EQ(batch.next, 4);
  const GlobalBatch dropped = batch_at(order, 4, 2, LastBatch::drop);
  EXPECT_EQ(dropped.first, 5);  // the next epoch: sample 4 was passed over
  EXPECT_EQ(dropped.next, 7);
  const GlobalBatch kept = batch_at(order, 4, 2, LastBatch::keep);
  EXPECT_EQ(kept.count, 1);
  EXPECT_EQ(kept.next, 5);
  EXPECT_THAT(samples_of(order, kept, {0, 2, 1, 1}, 0), ElementsAre(4));
  EXPECT_THAT(samples_of(order, kept, {1, 2, 1, 1}, 0), ElementsAre(-1));
  EXPECT_THAT(message_of<ConfigError>([&] { batch_at(order, 0, 6, LastBatch::drop); }),
              HasSubstr("a step takes 6 samples, but there are only 5"));
  EXPECT_THROW(SampleOrder(0, 1, true), ConfigError);
}

std::shared_ptr<const TokenStream> stream_of(const std::vector<std::string>& sources,
                                             const std::vector<std::string>& suffixes = {}) {
  return std::make_shared<TokenStream>(find_documents(sources, suffixes));
}

std::string text_of(const TokenStream& stream) {
  std::vector<int64_t> tokens(static_cast<size_t>(stream.size()));
  stream.read(0, tokens);
  return std::string(tokens.begin(), tokens.end());
}

TEST(Sources, FoldersAreReadDeepInOneOrderWithEndMarks) {
  const TemporaryFolder folder;
  folder.write("d/a.txt", "alpha");
  folder.write("d/sub/b.txt", "beta");
  folder.write("d/empty.txt", "");
  folder.write("d/c.bin", "no");
  const auto stream = stream_of({folder.file("d")}, {".txt"});
  EXPECT_EQ(stream->documents(), 3);
  EXPECT_EQ(stream->vocab_size(), 256);
  const std::string text = text_of(*stream);
  EXPECT_EQ(text.size(), 12u);
  EXPECT_NE(text.find(std::string("alpha\0", 6)), std::string::npos);
  EXPECT_NE(text.find(std::string("beta\0", 5)), std::string::npos);
  // The same data elsewhere is the same stream.
  const TemporaryFolder copy;
  std::filesystem::copy(folder.file("d"), copy.file("e"), std::filesystem::copy_options::recursive);
  const auto again = stream_of({copy.file("e")}, {".txt"});
  EXPECT_EQ(text_of(*again), text);
  EXPECT_EQ(again->digest(), stream->digest());
  copy.write("e/a.txt", "alphA");
  EXPECT_NE(stream_of({copy.file("e")}, {".txt"})->digest(), stream->digest());
}

TEST(Sources, ReadsAcrossDocumentsAtAnyPlace) {
  const TemporaryFolder folder;
  for (int i = 0; i < 20; ++i)
    folder.write("d/" + std::to_string(i), std::string(static_cast<size_t>(i * 3 % 7), 'a' + i));
  const auto stream = stream_of({folder.file("d")});
  const std::string text = text_of(*stream);
  for (int64_t begin = 0; begin < stream->size(); ++begin)
    for (int64_t size : {0, 1, 5, 17}) {
      if (begin + size > stream->size()) continue;
      std::vector<int64_t> part(static_cast<size_t>(size));
      stream->read(begin, part);
      EXPECT_EQ(std::string(part.begin(), part.end()), text.substr(begin, size));
    }
}

TEST(Sources, LargeFilesAreMapped) {
  const TemporaryFolder folder;
  std::string text(3 << 20, 'x');
  for (size_t i = 0; i < text.size(); ++i) text[i] = static_cast<char>('a' + i * 7 % 23);
  const auto stream = stream_of({folder.write("large.txt", text)});
  EXPECT_EQ(text_of(*stream), text + std::string(1, '\0'));
}

TEST(Sources, TokenFiles) {
  const TemporaryFolder folder;
  const std::vector<uint16_t> small{1, 2, 65535, 0};
  const std::string path =
      folder.write("t.bin", std::string(reinterpret_cast<const char*>(small.data()), 8));
  folder.write("t.bin.json", R"({"dtype": "uint16", "vocab_size": 65536, "count": 4})");
  std::vector<int64_t> tokens(4);
  auto stream = stream_of({path});
  stream->read(0, tokens);
  EXPECT_THAT(tokens, ElementsAre(1, 2, 65535, 0));
  EXPECT_EQ(stream->size(), 4);  // no end marks
  EXPECT_FALSE(stream->is_text());

  folder.write("t.bin.json", R"({"dtype": "uint32", "vocab_size": 70000, "count": 2})");
  stream = stream_of({path});
  std::vector<int64_t> wide(1);
  stream->read(1, wide);  // 65535 as the low half, 0 as the high half
  EXPECT_EQ(wide[0], 65535);
  EXPECT_THAT(message_of<FileError>([&] { stream->read(0, wide); }),
              HasSubstr("token 0 is 131073, wanted less than"));

  auto refused = [&](const char* sidecar) {
    folder.write("t.bin.json", sidecar);
    return message_of<FileError>([&] { stream_of({path}); });
  };
  EXPECT_THAT(refused(R"({"dtype": "int8", "vocab_size": 9, "count": 4})"),
              HasSubstr("got \"int8\""));
  EXPECT_THAT(refused(R"({"dtype": "uint16", "count": 4})"),
              HasSubstr("vocab_size: wanted a positive integer, got nothing"));
  EXPECT_THAT(refused(R"({"dtype": "uint16", "vocab_size": 9, "count": 5})"),
              HasSubstr("wanted 5 tokens of 2 bytes"));
  EXPECT_THAT(refused("[]"), HasSubstr("wanted a JSON object"));
}

TEST(Sources, BadSourcesAreNamed) {
  const TemporaryFolder folder;
  EXPECT_THAT(message_of<ConfigError>([&] { stream_of({folder.file("missing")}); }),
              HasSubstr("missing: no such file"));
  EXPECT_THAT(message_of<ConfigError>([&] { stream_of({folder.path()}); }),
              HasSubstr("found no file"));
  const std::string text = folder.write("a.txt", "text");
  const std::string tokens = folder.write("t.bin", "abcd");
  folder.write("t.bin.json", R"({"dtype": "uint16", "vocab_size": 65536, "count": 2})");
  EXPECT_THAT(message_of<ConfigError>([&] { stream_of({text, tokens}); }),
              HasSubstr("wanted one of the two"));
}

TEST(Sources, ErrorsNameTheKeyOfTheConfiguration) {
  EXPECT_THAT(message_of<ConfigError>([] { find_documents({"nowhere"}, {}, "data.validation"); }),
              HasSubstr("data.validation: nowhere"));
  TemporaryFolder folder;
  auto stream = std::make_shared<TokenStream>(find_documents({folder.write("t.txt", "abc")}, {}));
  EXPECT_THAT(message_of<ConfigError>([&] { split_dataset(stream, 0, 10, "data.validation"); }),
              HasSubstr("data.validation: 4 validation tokens"));
}

TEST(Sources, PythonLibraryIsRealTextWithoutTests) {
  const auto documents = find_documents({"python-stdlib"}, {});
  EXPECT_GT(documents.size(), 300u);
  int64_t bytes = 0;
  bool argparse = false;
  for (const Document& d : documents) {
    bytes += static_cast<int64_t>(d.bytes->size());
    argparse |= d.name == "argparse.py";
    EXPECT_THAT(d.name, ::testing::Not(HasSubstr("-packages/")));
    EXPECT_FALSE(d.name.starts_with("test/")) << d.name;
  }
  EXPECT_TRUE(argparse);
  EXPECT_GT(bytes, 5 << 20);
}

TEST(Dataset, SamplesAreWindowsThatShareOneToken) {
  const TemporaryFolder folder;
  const auto stream = stream_of({folder.write("a.txt", "0123456789")});  // and the end mark
  const Dataset data(stream, {0, stream->size()}, 5);
  EXPECT_EQ(data.samples(), 2);
  const std::vector<int64_t> samples{1, -1};
  const TokenBatch batch = data.batch(samples);
  EXPECT_EQ(batch.tokens, 5);
  const auto* in = batch.inputs.const_data_ptr<int64_t>();
  const auto* out = batch.targets.const_data_ptr<int64_t>();
  EXPECT_EQ(std::string(in, in + 5), "56789");
  EXPECT_EQ(std::string(out, out + 5), std::string("6789\0", 5));
  EXPECT_EQ(std::vector<int64_t>(out + 5, out + 10), std::vector<int64_t>(5, kMasked));
  EXPECT_EQ(std::vector<int64_t>(in + 5, in + 10), std::vector<int64_t>(5, 0));
}

TEST(Dataset, SplitIsDisjointAndSized) {
  const TemporaryFolder folder;
  const auto stream = stream_of({folder.write("a.txt", std::string(999, 'x'))});
  const Split split = split_dataset(stream, 0.1, 10);
  EXPECT_EQ(split.train.samples(), 89);      // 900 tokens
  EXPECT_EQ(split.validation.samples(), 9);  // 100 tokens
  EXPECT_THAT(message_of<ConfigError>([&] { split_dataset(stream, 0.1, 200); }),
              HasSubstr("100 validation tokens"));
  EXPECT_THAT(message_of<ConfigError>([&] { split_dataset(stream, 0.0, 2000); }),
              HasSubstr("training tokens are less"));
}

}  // namespace
}  // namespace dovetail::trainer
